//! One app's way through the story: it registers, gets a plan, and the fleet is changed under it.
//!
//! Start at [`Player::play`]. What it saw is a [`Pass`]; nothing is judged here.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use compass_shared::api::{EventView, NodeView, PlanView, QueryView, Trials};
use compass_shared::ids::QueryId;
use compass_shared::model::outcome::{Outcome, OutcomeCounts};

use super::arguments::{Fault, FaultKind};
use super::board::Picture;
use super::collect::plan_record;
use super::fleet::Fleet;
use super::measure::Reading;
use super::protocol::{Command, Said};
use super::record::{FrameCounts, Point};
use super::scenario::{Course, Scenario};
use super::view::View;

/// A film takes seconds; only met on a host that is far too slow.
const RENDER_DEADLINE: Duration = Duration::from_secs(120);
/// From registration to the first answer; only met when something is broken.
const FIRST_PLAN_DEADLINE: Duration = Duration::from_secs(180);
/// From the end to the app's last word: frames under way get their deadline.
const GOODBYE_DEADLINE: Duration = Duration::from_secs(40);
/// The API is asked this often.
const POLL: Duration = Duration::from_millis(500);
/// A killed coordinator is started again after this time: long enough to see that frames flow without it.
const COORDINATOR_GONE: Duration = Duration::from_secs(3);
/// Agents report once a second: what they say of this long ago is known.
const REPORTED: Duration = Duration::from_millis(1300);
/// Counters stand still when no node has sent more than this within [`REPORTED`].
const STILL_BYTES: u64 = 6_000;
/// They are read after so many times [`REPORTED`] at the latest.
const READINGS_MAX: u32 = 6;
/// The board shows frames of this long, in ms.
const SHOWN_MS: f64 = 61_000.0;

/// Something done to the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// The site's uplink drops to a twentieth.
    CutUplink,
    /// The light goes out.
    LightsOut,
    /// See [`FaultKind::KillAgent`].
    KillAgent,
    /// See [`FaultKind::KillCoordinator`].
    KillCoordinator,
    /// It is started again.
    RestartCoordinator,
}

/// An act that was done.
#[derive(Debug, Clone)]
pub(crate) struct Done {
    pub(crate) act: Act,
    pub(crate) at_ms: f64,
    pub(crate) what: String,
}

/// What one app saw.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    pub(crate) zero_unix_ms: f64,
    /// Arrival of the first answer.
    pub(crate) first_answer_ms: Option<f64>,
    pub(crate) points: Vec<Point>,
    pub(crate) done: Vec<Done>,
    /// The end of the last phase.
    pub(crate) ended_ms: f64,
    pub(crate) counts: Option<OutcomeCounts>,
    pub(crate) timer_lateness_p99_ms: f64,
    pub(crate) plans: Vec<PlanView>,
    pub(crate) trials: Trials,
    pub(crate) infeasible: Option<String>,
    /// What broke it off.
    pub(crate) failed: Option<String>,
    /// Before the first frame, at the first answer, at the end of the last phase, after the last frame.
    pub(crate) readings: Vec<Reading>,
}

/// Plays one pass.
pub(crate) struct Player<'a> {
    pub(crate) fleet: &'a mut Fleet,
    pub(crate) scenario: &'a Scenario,
    pub(crate) view: &'a mut dyn View,
    /// Name of the app's process.
    pub(crate) app: &'a str,
    /// Name of its query.
    pub(crate) query: QueryId,
    pub(crate) lines: Receiver<String>,
    pub(crate) course: Course,
    pub(crate) fault: Option<Fault>,
    /// Named in the view.
    pub(crate) title: &'a str,
}

/// Where a pass stands while it is played.
struct Stand {
    pass: Pass,
    picture: Picture,
    events_seen: u64,
    polled: Instant,
    said_goodbye: bool,
}

impl Player<'_> {
    /// Plays it to the end. An error means that the demo itself cannot go on; whatever goes wrong in the story is in the pass.
    pub(crate) fn play(mut self) -> anyhow::Result<Pass> {
        let mut stand = Stand::new(self.scenario);
        self.view.step("the app renders its film");
        let mut rendered = String::new();
        self.pump(&mut stand, RENDER_DEADLINE, |_, said| match said {
            Some(Said::Rendered { frames, bytes }) => {
                rendered = format!("{frames} frames, {:.0} MB", *bytes as f64 / 1e6);
                true
            }
            _ => false,
        })?
        .then_some(())
        .context("the app did not render its film in time")?;
        self.view.done(&format!("film rendered: {rendered}"));
        self.skip_old_events(&mut stand);
        stand.pass.readings.push(Reading::take(self.fleet)?);
        self.fleet.command(self.app, Command::Register)?;
        self.view
            .step("the app registers its query; operators are profiled on every node");
        self.title("profiling", &mut stand);
        let has_answer = self.pump(&mut stand, FIRST_PLAN_DEADLINE, |stand, _| {
            stand.pass.first_answer_ms.is_some()
        })?;
        if !has_answer {
            let report = stand.pass.infeasible.clone();
            let report = report.unwrap_or_else(|| "nothing was reported".to_owned());
            stand.pass.failed.get_or_insert(format!(
                "no answer within {FIRST_PLAN_DEADLINE:?} of registration: {report}"
            ));
            return Ok(stand.pass);
        }
        stand.pass.readings.push(Reading::take(self.fleet)?);
        self.course(&mut stand)?;
        stand.pass.readings.push(Reading::take(self.fleet)?);
        self.finish(&mut stand)?;
        Ok(stand.pass)
    }

    /// From the first answer to the end of the last phase.
    fn course(&mut self, stand: &mut Stand) -> anyhow::Result<()> {
        let start_ms = stand.pass.first_answer_ms.unwrap_or_default();
        let after = |duration: Duration| start_ms + duration.as_secs_f64() * 1e3;
        let Course { day, cut, dark } = self.course;
        let mut acts = vec![
            (after(day), Act::CutUplink),
            (after(day + cut), Act::LightsOut),
        ];
        if let Some(Fault { kind, at }) = self.fault {
            match kind {
                FaultKind::KillAgent => acts.push((after(at), Act::KillAgent)),
                FaultKind::KillCoordinator => {
                    acts.push((after(at), Act::KillCoordinator));
                    acts.push((after(at + COORDINATOR_GONE), Act::RestartCoordinator));
                }
            }
        }
        let end = after(day + cut + dark);
        acts.retain(|(at, _)| *at < end);
        acts.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.title("day, good uplink", stand);
        stand.picture.left_ms = Some(after(day));
        for (at, act) in acts {
            if !self.until(stand, at)? {
                return Ok(());
            }
            self.act(stand, act)?;
            match act {
                Act::CutUplink => {
                    self.title("uplink cut to 1/20", stand);
                    stand.picture.left_ms = Some(after(day + cut));
                }
                Act::LightsOut => {
                    self.title("lights out", stand);
                    stand.picture.left_ms = Some(end);
                }
                _ => {}
            }
        }
        self.until(stand, end)?;
        stand.pass.ended_ms = stand.now_ms();
        Ok(())
    }

    fn title(&self, phase: &str, stand: &mut Stand) {
        stand.picture.phase = format!("{}{phase}", self.title);
    }

    fn act(&mut self, stand: &mut Stand, act: Act) -> anyhow::Result<()> {
        let what = match act {
            Act::CutUplink => {
                let rate = self.scenario.uplink_mbit_s;
                self.fleet.scale_uplink(self.scenario.uplink_cut)?;
                let left = (rate * self.scenario.uplink_cut * 1e3).round() / 1e3;
                format!("the plant's uplink drops from {rate} to {left} Mbit/s")
            }
            Act::LightsOut => {
                self.fleet.command(self.app, Command::LightsOut)?;
                format!(
                    "the lights go out: brightness 1 to {}",
                    self.scenario.dark_brightness
                )
            }
            Act::KillAgent => {
                let victim = self.victim(stand);
                self.fleet.cluster.kill(&victim)?;
                format!("kill -9 of the agent {victim}")
            }
            Act::KillCoordinator => {
                self.fleet.kill_coordinator()?;
                "kill -9 of the coordinator".to_owned()
            }
            Act::RestartCoordinator => {
                self.fleet.restart_coordinator()?;
                "the coordinator is started again".to_owned()
            }
        };
        let at_ms = stand.now_ms();
        self.view.event(at_ms, &what);
        stand.pass.done.push(Done { act, at_ms, what });
        Ok(())
    }

    /// The node of the detector, unless the camera's own.
    fn victim(&self, stand: &Stand) -> String {
        let entry = self.scenario.query.entry.as_str();
        let plan = stand.picture.plan.iter();
        let mut operators = plan.flat_map(|plan| &plan.operators);
        let detector = operators.find(|operator| operator.operator == "detector");
        match detector.map(|operator| operator.node.as_str()) {
            Some(node) if node != entry => node.to_owned(),
            _ => "cloud-1".to_owned(),
        }
    }

    /// Lets the story go on until this time of the app's clock; false when the app is gone.
    fn until(&mut self, stand: &mut Stand, at_ms: f64) -> anyhow::Result<bool> {
        let left = Duration::from_secs_f64((at_ms - stand.now_ms()).max(0.0) / 1e3);
        self.pump(stand, left, |_, _| false)?;
        Ok(stand.pass.failed.is_none())
    }

    fn finish(&mut self, stand: &mut Stand) -> anyhow::Result<()> {
        let query = &self.query;
        let keep = |what: &str, error: anyhow::Error| format!("cannot read {what}: {error:#}");
        match self.fleet.api.get(&format!("/v1/queries/{query}/plans")) {
            Ok(plans) => stand.pass.plans = plans,
            Err(error) => stand.fail(keep("the plans", error)),
        }
        match self.fleet.api.get(&format!("/v1/trials?query={query}")) {
            Ok(trials) => stand.pass.trials = trials,
            Err(error) => stand.fail(keep("the trials", error)),
        }
        if stand.pass.failed.is_none() {
            self.fleet.command(self.app, Command::Finish)?;
            self.title("last frames", stand);
            stand.picture.left_ms = None;
            self.pump(stand, GOODBYE_DEADLINE, |stand, _| stand.said_goodbye)?;
            if !stand.said_goodbye {
                stand.fail("the app did not say goodbye in time".to_owned());
            }
        }
        let reading = self.read_when_still()?;
        stand.pass.readings.push(reading);
        Ok(())
    }

    /// Reads the counters once they stand still, so that what agents said a second ago can be compared with what links count now.
    fn read_when_still(&self) -> anyhow::Result<Reading> {
        let mut reading = Reading::take(self.fleet)?;
        for _ in 0..READINGS_MAX {
            std::thread::sleep(REPORTED);
            let earlier = std::mem::replace(&mut reading, Reading::take(self.fleet)?);
            let mut nodes = self.scenario.nodes.iter();
            if nodes.all(|node| reading.relay_sent_bytes(node.name, &earlier) <= STILL_BYTES) {
                break;
            }
        }
        Ok(reading)
    }

    /// Hears the app and polls the coordinator until the time is over (false), or until this is so or the app is gone (true).
    fn pump(
        &mut self,
        stand: &mut Stand,
        time: Duration,
        mut enough: impl FnMut(&Stand, Option<&Said>) -> bool,
    ) -> anyhow::Result<bool> {
        let until = Instant::now() + time;
        loop {
            let now = Instant::now();
            if now >= until {
                return Ok(false);
            }
            let next = until.min(stand.polled + POLL);
            match self.lines.recv_timeout(next.saturating_duration_since(now)) {
                Ok(line) => {
                    let said: Said = serde_json::from_str(&line)
                        .with_context(|| format!("the app said what is not understood: {line}"))?;
                    let is_enough = stand.hear(&said, self.view);
                    if is_enough || enough(stand, Some(&said)) {
                        return Ok(true);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    if stand.polled.elapsed() >= POLL {
                        self.poll(stand);
                        if enough(stand, None) {
                            return Ok(true);
                        }
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    if !stand.said_goodbye {
                        stand.fail("the app's process has ended".to_owned());
                    }
                    return Ok(true);
                }
            }
        }
    }

    fn skip_old_events(&self, stand: &mut Stand) {
        let events: Vec<EventView> = self.fleet.api.get("/v1/events?after=0").unwrap_or_default();
        stand.events_seen = events.last().map_or(0, |event| event.sequence);
    }

    /// How things stand at the coordinator; one that does not answer leaves the picture as it was.
    fn poll(&mut self, stand: &mut Stand) {
        stand.polled = Instant::now();
        if stand.pass.zero_unix_ms == 0.0 {
            return;
        }
        let api = &self.fleet.api;
        let path = format!("/v1/events?after={}", stand.events_seen);
        for event in api.get::<Vec<EventView>>(&path).unwrap_or_default() {
            stand.events_seen = stand.events_seen.max(event.sequence);
            if let Some(what) = worth_showing(&event) {
                let at_ms = event.unix_ms as f64 - stand.pass.zero_unix_ms;
                self.view.event(at_ms, &what);
            }
        }
        if let Ok(nodes) = api.get::<Vec<NodeView>>("/v1/nodes") {
            stand.picture.nodes = nodes;
        }
        if let Ok(query) = api.get::<QueryView>(&format!("/v1/queries/{}", self.query)) {
            stand.picture.plan = query.plan.as_ref().map(plan_record);
        }
        if stand.pass.first_answer_ms.is_none() {
            let path = format!("/v1/trials?query={}", self.query);
            let trials = api.get::<Trials>(&path).unwrap_or_default();
            stand.picture.trials = trials.trials.len();
        }
        stand.refresh();
        let mut picture = stand.picture.clone();
        picture.left_ms = picture.left_ms.map(|end| end - picture.now_ms);
        self.view.show(&picture);
    }
}

/// An event for people: what concerns the query, lost and returned nodes, alarms. Links come and go too often.
fn worth_showing(event: &EventView) -> Option<String> {
    let is_query = event.object.starts_with("query");
    let is_node = event.message.starts_with("node ");
    let shown = match event.kind.as_str() {
        "alarm" | "plan" => true,
        "trigger" => is_query || is_node,
        _ => false,
    };
    let message = match event.message.rsplit_once(" (by ") {
        Some((message, _)) => message,
        None => &event.message,
    };
    let kind = &event.kind;
    shown.then(|| match kind.as_str() {
        "alarm" => format!("alarm, {}: {message}", event.object),
        _ => message.to_owned(),
    })
}

impl Stand {
    fn new(scenario: &Scenario) -> Self {
        Self {
            pass: Pass::default(),
            picture: Picture {
                slo: Some(scenario.slo),
                ..Picture::default()
            },
            events_seen: 0,
            polled: Instant::now(),
            said_goodbye: false,
        }
    }

    /// The app's clock.
    fn now_ms(&self) -> f64 {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        unix.map_or(0.0, |now| now.as_secs_f64() * 1e3) - self.pass.zero_unix_ms
    }

    fn fail(&mut self, why: String) {
        self.pass.failed.get_or_insert(why);
    }

    /// Takes in what the app says; true when it will say nothing more.
    fn hear(&mut self, said: &Said, view: &mut dyn View) -> bool {
        match said {
            Said::Rendered { .. } | Said::Dark { .. } => {}
            Said::Registered { zero_unix_ms } => self.pass.zero_unix_ms = *zero_unix_ms,
            Said::Plan {
                at_ms,
                generation,
                trigger,
                ..
            } => {
                view.event(
                    *at_ms,
                    &format!("the app hears of plan {generation}: {trigger}"),
                );
            }
            Said::Frame {
                frame,
                at_ms,
                latency_ms,
                outcome,
                generation,
                accuracy,
            } => {
                if let (None, Some(latency)) = (self.pass.first_answer_ms, latency_ms) {
                    self.pass.first_answer_ms = Some(at_ms + latency);
                }
                count(&mut self.picture.frames, *outcome);
                self.pass.points.push(Point {
                    frame: *frame,
                    at_ms: *at_ms,
                    latency_ms: *latency_ms,
                    outcome: *outcome,
                    generation: *generation,
                    accuracy: *accuracy,
                });
            }
            Said::Infeasible { report } => {
                let at_ms = self.now_ms();
                view.event(at_ms, &format!("no plan meets the SLOs: {report}"));
                self.pass.infeasible = Some(report.clone());
            }
            Said::Connection { at_ms, what } => view.event(*at_ms, what),
            Said::Goodbye {
                counts,
                timer_lateness_p99_ms,
            } => {
                self.pass.counts = Some(*counts);
                self.pass.timer_lateness_p99_ms = *timer_lateness_p99_ms;
                self.said_goodbye = true;
                return true;
            }
            Said::Failed { reason } => {
                self.fail(format!("the app cannot go on: {reason}"));
                return true;
            }
        }
        false
    }

    fn refresh(&mut self) {
        let now_ms = self.now_ms();
        let recent = self
            .pass
            .points
            .iter()
            .rev()
            .take_while(|point| point.at_ms > now_ms - SHOWN_MS);
        self.picture.points = recent.copied().collect();
        self.picture.points.reverse();
        self.picture.now_ms = now_ms;
    }
}

fn count(frames: &mut FrameCounts, outcome: Outcome) {
    frames.sent += 1;
    match outcome {
        Outcome::Answered => frames.answered += 1,
        Outcome::Late => frames.late += 1,
        Outcome::Skipped => frames.skipped += 1,
        Outcome::Expired => frames.expired += 1,
        Outcome::Rejected => frames.rejected += 1,
    }
}

/// Whether a pass has everything that a record is made from.
pub(crate) fn complete(pass: &Pass) -> anyhow::Result<[&Reading; 4]> {
    match pass.readings.as_slice() {
        [quiet, first, last, after] => Ok([quiet, first, last, after]),
        _ => bail!("the story broke off"),
    }
}
