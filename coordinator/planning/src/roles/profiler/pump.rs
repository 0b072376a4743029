//! Starts what can be started, takes in what has ended, and closes trials whose stages are all there.

use std::time::Duration;

use compass_shared::ids::{Digest, NodeId, QueryId, TrialId};
use compass_shared::model::plan::{ArtifactRef, InstanceTarget, instance_id};
use compass_shared::model::trial::{RunStage, StageDone, StageFailure, StageInput};
use compass_shared::time::Moment;

use super::place::{Place, Source};
use super::stage::{Busy, Stage, StageState, Trial};
use super::{Effect, Profiler, StageKey, StageRecord, StageResult, TrialOutcome};

/// An answer may be this much later than the deadline the node was given.
const ANSWER_SLACK: Duration = Duration::from_secs(5);
/// A stage that failed for a passing reason is tried again after this long.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
/// A node that had no room is asked again after this long at first, twice as long each time it says so again, and this long at most.
/// Whatever takes its room (live work, a stage that is being killed) does not go away faster for being asked.
const BUSY_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// A stage that was refused by one node after the other for this long is given up; it is no failure of the configuration.
const BUSY_PATIENCE: Duration = Duration::from_secs(30);

impl Profiler {
    /// Starts stages in the order trials came, and ends trials that have all they need.
    pub(super) fn pump(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let mut index = 0;
        while index < self.trials.len() {
            self.start_stages(now, index, effects);
            match self.outcome(index) {
                Some(outcome) => {
                    self.trials.remove(index);
                    effects.push(Effect::Outcome(Box::new(outcome)));
                }
                None => index += 1,
            }
        }
    }

    fn start_stages(&mut self, now: Moment, index: usize, effects: &mut Vec<Effect>) {
        for position in self.trials[index].positions.clone() {
            let trial = &self.trials[index];
            let key = trial.key(position);
            let not_before = match self.stages.get(&key).map(|s| &s.state) {
                None => Moment(0),
                Some(StageState::Waiting { not_before }) => *not_before,
                Some(_) => continue,
            };
            if now < not_before || self.running_count() >= self.settings.stages_at_once as usize {
                continue;
            }
            let Some(sources) = self.sources(trial, position) else {
                continue;
            };
            // An input on a node that is gone has to be made again first.
            if self.remake_lost_inputs(index, &sources) {
                continue;
            }
            let trial = &self.trials[index];
            let Some(place) = self.place(now, trial, position, &sources) else {
                continue;
            };
            if place.is_free {
                self.start(now, index, position, &sources, place, effects);
            }
        }
    }

    /// Puts inputs whose holder is gone back to waiting; tells whether there were any.
    fn remake_lost_inputs(&mut self, index: usize, sources: &[Source]) -> bool {
        let Some(cluster) = self.cluster.clone() else {
            return false;
        };
        let mut lost = false;
        for source in sources {
            let is_gone = !cluster.nodes.get(&source.holder).is_some_and(|n| n.online);
            if let (true, Some(input)) = (is_gone, source.operator) {
                let key = self.trials[index].key(input);
                self.stages.remove(&key);
                lost = true;
            }
        }
        lost
    }

    fn start(
        &mut self,
        now: Moment,
        index: usize,
        position: usize,
        sources: &[Source],
        place: Place,
        effects: &mut Vec<Effect>,
    ) {
        let key = self.trials[index].key(position);
        self.trials[index].started.push(key);
        let trial = &self.trials[index];
        let query = &trial.request.query;
        let operator = &query.pipeline.operators[position];
        let Some(entry) = self.catalogue.0.get(&operator.kind) else {
            return;
        };
        let own = trial
            .request
            .configuration
            .of(&operator.id)
            .cloned()
            .unwrap_or_default();
        let artifact = entry.artifact(&own).map(|a| ArtifactRef {
            name: a.name.clone(),
            digest: a.digest,
            bytes: a.bytes,
        });
        let inputs = sources
            .iter()
            .map(|source| StageInput {
                operator: source
                    .operator
                    .map(|p| query.pipeline.operators[p].id.clone()),
                prefix: source
                    .operator
                    .map_or_else(|| Digest::of(b""), |p| trial.key(p).prefix),
                holder: source.holder.clone(),
            })
            .collect();
        let mut remotes: Vec<NodeId> = sources
            .iter()
            .map(|s| s.holder.clone())
            .filter(|holder| *holder != place.node)
            .collect();
        remotes.dedup();
        let id = self.next_trial;
        let stage = RunStage {
            trial: id,
            query: query.id.clone(),
            operator: operator.id.clone(),
            instance: InstanceTarget {
                instance: instance_id(
                    &operator.kind,
                    artifact.as_ref().map(|a| &a.digest),
                    &own,
                    &place.node,
                ),
                kind: operator.kind.clone(),
                runtime: entry.runtime.clone(),
                configuration: own,
                artifact,
                share: place.share,
                state: entry.state,
            },
            inputs,
            set: trial.request.set,
            segments: trial.request.segments.clone(),
            prefix: key.prefix,
            return_outputs: trial.request.judged.as_ref() == Some(&operator.id),
            deadline: self.settings.stage_deadline,
        };
        let name = operator.id.clone();
        for holder in &remotes {
            effects.push(Effect::Pair {
                reader: place.node.clone(),
                holder: holder.clone(),
            });
        }
        self.next_trial = id.next();
        let before = self.stages.get(&key);
        let attempts = before.map_or(0, |s| s.attempts);
        let refused_since = before.and_then(|s| s.refused_since);
        self.stages.insert(
            key,
            Stage {
                operator: name,
                attempts,
                refused_since,
                state: StageState::Running {
                    trial: id,
                    node: place.node.clone(),
                    since: now,
                    remote: (remotes.len() == 1).then(|| remotes[0].clone()),
                    expected_ms: place.expected_ms,
                },
            },
        );
        effects.push(Effect::RunStage {
            node: place.node,
            stage: Box::new(stage),
        });
    }

    /// The end of a trial, when all its stages are done or one has failed for good.
    fn outcome(&mut self, index: usize) -> Option<TrialOutcome> {
        let trial = &self.trials[index];
        let mut results = Vec::with_capacity(trial.positions.len());
        let mut failure = None;
        for position in &trial.positions {
            let key = trial.key(*position);
            let operator = trial.request.query.pipeline.operators[*position].id.clone();
            match self.stages.get(&key).map(|s| &s.state) {
                Some(StageState::Done { node, done }) => results.push(StageResult {
                    operator,
                    node: node.clone(),
                    done: (**done).clone(),
                    cached: !trial.started.contains(&key),
                }),
                Some(StageState::Failed(reason)) => {
                    failure = Some((operator, reason.clone()));
                    break;
                }
                _ => return None,
            }
        }
        let hits = results.iter().filter(|r| r.cached).count();
        self.cache_hits += hits as u64;
        let request = &self.trials[index].request;
        Some(TrialOutcome {
            query: request.query.id.clone(),
            number: request.number,
            set: request.set,
            configuration: request.configuration.clone(),
            result: failure.map_or(Ok(results), Err),
        })
    }

    pub(super) fn done(
        &mut self,
        now: Moment,
        node: &NodeId,
        done: StageDone,
        effects: &mut Vec<Effect>,
    ) {
        let _ = now;
        let Some(key) = self.running_key(node, done.trial) else {
            return;
        };
        let Some(stage) = self.stages.get_mut(&key) else {
            return;
        };
        let StageState::Running { remote, .. } = &stage.state else {
            return;
        };
        self.busy.remove(node);
        if let (Some(from), Some((ms, bytes))) = (remote, done.transfer) {
            effects.push(Effect::Transfer {
                from: from.clone(),
                to: node.clone(),
                bytes,
                ms,
            });
        }
        let is_broken = done
            .samples
            .iter()
            .any(|s| !s.wall_ms.is_finite() || !s.cpu_ms.is_finite() || s.wall_ms < 0.0);
        if is_broken || done.samples.is_empty() {
            let reason = "a measurement that is no number, or none at all".to_owned();
            stage.state = StageState::Failed(StageFailure::Crashed(reason));
            return;
        }
        let operator = stage.operator.clone();
        let record = self.record(&operator, key, node, &done);
        if let Some((kind, record)) = record {
            let frames = f64::from(record.samples.max(1));
            let speed = self
                .cluster
                .as_ref()
                .and_then(|c| c.nodes.get(node))
                .and_then(|n| n.description.emulated_speed)
                .unwrap_or(1.0);
            let share = done.achieved_cores.clamp(1e-3, 1.0);
            self.work_ms
                .insert(kind, record.wall_ms / frames * speed * share);
            effects.push(Effect::Ran(record));
        }
        if let Some(stage) = self.stages.get_mut(&key) {
            stage.state = StageState::Done {
                node: node.clone(),
                done: Box::new(done),
            };
        }
    }

    fn record(
        &self,
        operator: &compass_shared::ids::OperatorId,
        key: StageKey,
        node: &NodeId,
        done: &StageDone,
    ) -> Option<(compass_shared::ids::OperatorKind, StageRecord)> {
        let trial = self.trials.iter().find(|t| t.started.contains(&key))?;
        let found = trial.request.query.pipeline.operator(operator)?;
        let own = trial.request.configuration.of(operator);
        Some((
            found.kind.clone(),
            StageRecord {
                query: trial.request.query.id.clone(),
                operator: operator.clone(),
                node: node.clone(),
                configuration: own.map(ToString::to_string).unwrap_or_default(),
                samples: u32::try_from(done.samples.len()).unwrap_or(u32::MAX),
                wall_ms: done.samples.iter().map(|s| s.wall_ms).sum(),
                cpu_ms: done.samples.iter().map(|s| s.cpu_ms).sum(),
            },
        ))
    }

    pub(super) fn failed(
        &mut self,
        now: Moment,
        node: &NodeId,
        trial: TrialId,
        failure: StageFailure,
        effects: &mut Vec<Effect>,
    ) {
        let _ = effects;
        let Some(key) = self.running_key(node, trial) else {
            return;
        };
        if matches!(failure, StageFailure::InputsUnavailable(_)) {
            self.forget_inputs_of(key);
        }
        if failure == StageFailure::Busy {
            self.note_busy(now, node);
        } else {
            self.busy.remove(node);
        }
        self.settle_failure(now, key, failure);
    }

    /// A node has no room: all stages keep away from it for a while, not only the one that was refused.
    fn note_busy(&mut self, now: Moment, node: &NodeId) {
        let times = self.busy.get(node).map_or(0, |busy| busy.times);
        let doubled = BUSY_PAUSE.0 * 2_u32.saturating_pow(times.min(8));
        let busy = Busy {
            until: now + doubled.min(BUSY_PAUSE.1),
            times: times.saturating_add(1),
        };
        self.busy.insert(node.clone(), busy);
    }

    /// Whoever held the inputs of a stage does not have them any more: they are made again.
    fn forget_inputs_of(&mut self, key: StageKey) {
        let mut lost = Vec::new();
        for trial in &self.trials {
            for position in &trial.positions {
                if trial.key(*position) == key {
                    let inputs = &trial.request.query.pipeline.operators[*position].inputs;
                    lost.extend(
                        inputs
                            .iter()
                            .filter_map(|id| trial.request.query.pipeline.position(id))
                            .map(|input| trial.key(input)),
                    );
                }
            }
        }
        for input in lost {
            if let Some(stage) = self.stages.get_mut(&input)
                && matches!(stage.state, StageState::Done { .. })
            {
                stage.state = StageState::Waiting {
                    not_before: Moment(0),
                };
            }
        }
    }

    fn settle_failure(&mut self, now: Moment, key: StageKey, failure: StageFailure) {
        let attempts_max = self.settings.attempts;
        let Some(stage) = self.stages.get_mut(&key) else {
            return;
        };
        let (is_over, pause) = match failure {
            StageFailure::Busy => {
                let since = *stage.refused_since.get_or_insert(now);
                // Another node may have room at once; the busy one is left alone by `place`.
                (now.since(since) >= BUSY_PATIENCE, Duration::ZERO)
            }
            // Deterministic: it would only happen again.
            StageFailure::Deadline | StageFailure::Cancelled => (true, Duration::ZERO),
            StageFailure::Crashed(_)
            | StageFailure::InputsUnavailable(_)
            | StageFailure::Artifact(_)
            | StageFailure::Unavailable(_) => {
                stage.attempts += 1;
                (stage.attempts >= attempts_max, AGAIN_AFTER)
            }
        };
        stage.state = if is_over {
            StageState::Failed(failure)
        } else {
            StageState::Waiting {
                not_before: now + pause,
            }
        };
    }

    /// Stages on nodes that are gone wait for another one.
    pub(super) fn fail_lost(&mut self, now: Moment) {
        let Some(cluster) = self.cluster.clone() else {
            return;
        };
        for stage in self.stages.values_mut() {
            if let StageState::Running { node, .. } = &stage.state
                && !cluster.nodes.get(node).is_some_and(|n| n.online)
            {
                stage.state = StageState::Waiting { not_before: now };
            }
        }
    }

    /// Stages whose answer is overdue have failed.
    pub(super) fn expire(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let patience = self.settings.stage_deadline + ANSWER_SLACK;
        let overdue: Vec<(StageKey, NodeId, TrialId)> = self
            .stages
            .iter()
            .filter_map(|(key, stage)| match &stage.state {
                StageState::Running {
                    trial, node, since, ..
                } if now.since(*since) >= patience => Some((*key, node.clone(), *trial)),
                _ => None,
            })
            .collect();
        for (key, node, trial) in overdue {
            // A node that lives says itself when a stage has passed its deadline.
            let why = format!("{node} gave no answer within {} s", patience.as_secs());
            effects.push(Effect::CancelStage { node, trial });
            self.settle_failure(now, key, StageFailure::Unavailable(why));
        }
    }

    /// Calls off what only this query's trials need.
    pub(super) fn cancel(&mut self, query: &QueryId, effects: &mut Vec<Effect>) {
        let (gone, kept): (Vec<Trial>, Vec<Trial>) = std::mem::take(&mut self.trials)
            .into_iter()
            .partition(|t| t.request.query.id == *query);
        self.trials = kept;
        for trial in gone {
            for position in &trial.positions {
                let key = trial.key(*position);
                let is_shared = self
                    .trials
                    .iter()
                    .any(|t| t.positions.iter().any(|p| t.key(*p) == key));
                if is_shared {
                    continue;
                }
                if let Some(Stage {
                    state: StageState::Running { trial, node, .. },
                    ..
                }) = self.stages.get(&key)
                {
                    effects.push(Effect::CancelStage {
                        node: node.clone(),
                        trial: *trial,
                    });
                    self.stages.remove(&key);
                } else if matches!(
                    self.stages.get(&key),
                    Some(Stage {
                        state: StageState::Waiting { .. } | StageState::Failed(_),
                        ..
                    })
                ) {
                    self.stages.remove(&key);
                }
            }
            effects.push(Effect::Outcome(Box::new(TrialOutcome {
                query: trial.request.query.id.clone(),
                number: trial.request.number,
                set: trial.request.set,
                configuration: trial.request.configuration.clone(),
                result: Err((
                    trial.request.query.pipeline.operators[0].id.clone(),
                    StageFailure::Cancelled,
                )),
            })));
        }
    }

    /// The moment of the next deadline or pause.
    pub(super) fn wake(&self, now: Moment, effects: &mut Vec<Effect>) {
        let patience = self.settings.stage_deadline + ANSWER_SLACK;
        let next = self
            .stages
            .values()
            .filter_map(|stage| match &stage.state {
                StageState::Running { since, .. } => Some(*since + patience),
                StageState::Waiting { not_before } => Some(*not_before),
                _ => None,
            })
            .chain(self.busy.values().map(|busy| busy.until))
            .filter(|moment| *moment > now)
            .min();
        effects.extend(next.map(Effect::WakeAt));
    }
}
