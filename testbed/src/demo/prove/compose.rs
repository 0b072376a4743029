//! Latency and cost of a configuration on a placement: a small simulation of its own, so that the planner is not proved right by itself.
//!
//! Start at [`Ground`] and [`Ground::latencies_ms`]. **Taken into account:** every frame of the film with its own sizes; operators that serve
//! one frame at a time in the time measured here over emulated speed and share; waiting before them and before links; rate of the narrowest
//! pipe and delay of every pipe on a path, as the relay is told them; packets' own bytes, and what agents themselves send over the site's
//! uplink; the hop to the entry node and the way back through it; a fixed time per hop and per operator; granted cores and bytes that leave
//! a site, at the price sheet's prices. **Not taken into account:** lost packets, congestion control, frames that are dropped where a queue
//! is full, memory, what else the host does, the times of switches.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::Context;
use compass_shared::model::cluster::PriceSheet;
use compass_shared::spec::quantity::WrittenCpu;

use super::super::scenario::{CAMERA, SITE, Scenario};
use super::observe::Candidate;
use crate::relay::topology::{uplink_down, uplink_up};

/// Bytes on the wire per byte of payload: headers of packets and acknowledgements.
pub(super) const WIRE: f64 = 1.06;
/// Added per hop, in ms: encryption, framing, two wake-ups (`compass-testbed bench hop` measures them).
pub(super) const HOP_MS: f64 = 1.5;
/// Added per operator, in ms: to its worker and back.
pub(super) const WORKER_MS: f64 = 0.5;
/// What reports, keep-alives and pings of each node at the site take of its uplink, in bytes per ms: an idle node of the demo sends 4 to 6 kB/s.
const CONTROL_BYTES_PER_MS: f64 = 5.0;
/// Bytes of a packet.
const PACKET_BYTES: f64 = 1_300.0;

/// A node of the fleet.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) name: String,
    /// Relative to this host's core.
    pub(super) speed: f64,
    /// Thousandths of a core that may be granted.
    pub(super) millicores: u32,
    /// USD for a core and an hour.
    pub(super) core_price: f64,
}

/// A path from one machine to another.
#[derive(Debug, Clone, Default)]
pub(super) struct Way {
    /// Bytes per ms of the pipes on it.
    pub(super) pipes: Vec<(usize, f64)>,
    pub(super) delay_ms: f64,
    pub(super) leaves_site: bool,
}

/// A fleet and its links in one phase.
#[derive(Debug, Clone)]
pub(super) struct Ground {
    pub(super) places: Vec<Place>,
    /// Position of the entry node.
    pub(super) entry: usize,
    /// From each node to each, row by row.
    pub(super) ways: Vec<Way>,
    /// Between the camera and its entry node, there and back.
    pub(super) camera: [Way; 2],
    /// Number of pipes.
    pub(super) pipes: usize,
    /// USD per byte that leaves a site.
    pub(super) egress: f64,
    pub(super) rate_hz: f64,
}

/// Where each operator runs, and with how many thousandths of a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) nodes: Vec<usize>,
    pub(super) shares: Vec<u32>,
}

/// What a frame goes through.
#[derive(Debug, Clone, Copy)]
enum Step<'g> {
    /// The output of an operator (of the camera if none) travels.
    Hop(&'g Way, Option<usize>),
    /// An operator serves.
    Serve(usize),
}

impl Ground {
    /// The scenario's fleet, its uplink scaled to this part.
    pub(super) fn new(
        scenario: &Scenario,
        prices: &PriceSheet,
        uplink: f64,
    ) -> anyhow::Result<Self> {
        let relay = scenario.topology().relay_config(0)?;
        let scaled = [uplink_up(SITE), uplink_down(SITE)];
        let at_site = scenario.nodes.iter().filter(|node| node.site == SITE);
        let control = CONTROL_BYTES_PER_MS * at_site.count() as f64;
        let byte_rate = |name: &String| {
            let pipe = relay.pipes.iter().position(|pipe| pipe.name == *name);
            let pipe = pipe.with_context(|| format!("no pipe {name}"))?;
            let rate = relay.pipes[pipe].shape.rate_bps;
            let rate = rate.map_or(f64::INFINITY, |rate| rate as f64) / 8e3;
            let left = if scaled.contains(name) {
                (rate * uplink - control).max(f64::MIN_POSITIVE)
            } else {
                rate
            };
            anyhow::Ok((pipe, left))
        };
        let site = |name: &str| {
            let mut nodes = scenario.nodes.iter();
            nodes
                .find(|node| node.name == name)
                .map_or(SITE, |n| n.site)
        };
        let way = |from: &str, to: &str| {
            let mut paths = relay.paths.iter();
            let path = paths.find(|path| path.from == from && path.to == to);
            let path = path.with_context(|| format!("no path from {from} to {to}"))?;
            anyhow::Ok(Way {
                pipes: path.pipes.iter().map(byte_rate).collect::<Result<_, _>>()?,
                delay_ms: path.shape.delay_ms,
                leaves_site: site(from) != site(to),
            })
        };
        let entry = scenario.query.entry.as_str();
        let mut places = Vec::new();
        let mut ways = Vec::new();
        for node in &scenario.nodes {
            let cpu: WrittenCpu = node.cpu.parse().map_err(anyhow::Error::msg)?;
            let mut tiers = prices.core_hour.iter();
            let price = tiers.find(|(tier, _)| tier.as_str() == node.tier);
            let (_, price) = price.with_context(|| format!("no price for {}", node.tier))?;
            places.push(Place {
                name: node.name.to_owned(),
                speed: node.speed,
                millicores: cpu.0.0,
                core_price: *price,
            });
            for to in &scenario.nodes {
                ways.push(way(node.name, to.name)?);
            }
        }
        let position = places.iter().position(|place| place.name == entry);
        Ok(Self {
            entry: position.context("the entry node is in the fleet")?,
            camera: [way(CAMERA, entry)?, way(entry, CAMERA)?],
            pipes: relay.pipes.len(),
            egress: prices.egress_gb / 1e9,
            rate_hz: scenario.rate_hz(),
            places,
            ways,
        })
    }

    pub(super) fn way(&self, from: usize, to: usize) -> &Way {
        &self.ways[from * self.places.len() + to]
    }

    /// Hops under a placement: the way, and the operator whose output travels (none: the camera's frames).
    pub(super) fn hops(&self, nodes: &[usize]) -> Vec<(&Way, Option<usize>)> {
        let steps = self.steps(nodes).into_iter();
        steps
            .filter_map(|step| match step {
                Step::Hop(way, of) => Some((way, of)),
                Step::Serve(_) => None,
            })
            .collect()
    }

    fn steps(&self, nodes: &[usize]) -> Vec<Step<'_>> {
        let mut steps = vec![Step::Hop(&self.camera[0], None)];
        let mut at = self.entry;
        for (operator, node) in nodes.iter().enumerate() {
            if *node != at {
                steps.push(Step::Hop(self.way(at, *node), operator.checked_sub(1)));
            }
            steps.push(Step::Serve(operator));
            at = *node;
        }
        let last = nodes.len().checked_sub(1);
        if at != self.entry {
            steps.push(Step::Hop(self.way(at, self.entry), last));
        }
        steps.push(Step::Hop(&self.camera[1], last));
        steps
    }

    /// USD per hour: granted cores, and what leaves sites.
    pub(super) fn cost_per_h(&self, candidate: &Candidate, input: &[f64], layout: &Layout) -> f64 {
        let cores = layout.nodes.iter().zip(&layout.shares);
        let cores =
            cores.map(|(node, share)| f64::from(*share) / 1e3 * self.places[*node].core_price);
        cores.sum::<f64>() + self.egress_per_h(candidate, input, &layout.nodes)
    }

    /// USD per hour for bytes that leave sites.
    pub(super) fn egress_per_h(
        &self,
        candidate: &Candidate,
        input: &[f64],
        nodes: &[usize],
    ) -> f64 {
        let hours = input.len() as f64 / self.rate_hz / 3600.0;
        let hops = self.hops(nodes).into_iter();
        let dear = hops.filter(|(way, _)| way.leaves_site);
        let bytes = dear.map(|(_, of)| candidate.travelling(input, of).sum::<f64>());
        bytes.sum::<f64>() * self.egress / hours
    }

    /// From capture to result, of every kept frame from `lead_in` on, in ms. `input` are the sizes of the camera's frames.
    pub(super) fn latencies_ms(
        &self,
        candidate: &Candidate,
        input: &[f64],
        lead_in: usize,
        layout: &Layout,
    ) -> Vec<f64> {
        let steps = self.steps(&layout.nodes);
        let mut operator_free = vec![0.0_f64; layout.nodes.len()];
        let mut pipe_free = vec![0.0_f64; self.pipes];
        let mut latencies = Vec::new();
        let captured = |frame: usize| frame as f64 * 1e3 / self.rate_hz;
        // Events in the order of time; whole microseconds, because fractions have no order.
        let micros = |ms: f64| (ms * 1e3) as u64;
        let mut events: BinaryHeap<Reverse<(u64, usize, usize)>> = (0..input.len())
            .map(|frame| Reverse((micros(captured(frame)), frame, 0)))
            .collect();
        while let Some(Reverse((at, frame, number))) = events.pop() {
            let now = at as f64 / 1e3;
            let Some(step) = steps.get(number) else {
                if frame >= lead_in {
                    latencies.push(now - captured(frame));
                }
                continue;
            };
            let then = match *step {
                Step::Hop(way, of) => {
                    let bytes = of.map_or(input[frame], |of| candidate.bytes[of][frame]);
                    crossed(way, bytes * WIRE, now, &mut pipe_free) + HOP_MS
                }
                Step::Serve(operator) => {
                    let cores = self.places[layout.nodes[operator]].speed
                        * f64::from(layout.shares[operator])
                        / 1e3;
                    let free = &mut operator_free[operator];
                    *free = free.max(now) + candidate.cpu_ms_of(operator, frame) / cores;
                    // Frames that are not kept end at the last filter.
                    if operator + 1 == candidate.filters && !candidate.kept[frame] {
                        continue;
                    }
                    *free + WORKER_MS
                }
            };
            events.push(Reverse((micros(then), frame, number + 1)));
        }
        latencies
    }
}

/// When the last byte is through all pipes and the delay is over. Packets of a frame follow each other from pipe to pipe.
fn crossed(way: &Way, bytes: f64, now: f64, pipe_free: &mut [f64]) -> f64 {
    let mut head = now;
    let mut tail = now;
    for (pipe, rate) in &way.pipes {
        let start = head.max(pipe_free[*pipe]);
        tail = (start + bytes / rate).max(tail);
        pipe_free[*pipe] = tail;
        head = start + PACKET_BYTES / rate;
    }
    tail + way.delay_ms
}

impl Candidate {
    /// Milliseconds an operator takes for a frame; those of the timed frames in turn.
    fn cpu_ms_of(&self, operator: usize, frame: usize) -> f64 {
        let times = &self.cpu_ms[operator];
        times[frame % times.len()]
    }

    /// Sizes of what travels behind an operator, or from the camera, of the frames that do.
    pub(super) fn travelling<'a>(
        &'a self,
        input: &'a [f64],
        of: Option<usize>,
    ) -> impl Iterator<Item = f64> + 'a {
        let sizes = of.map_or(input, |of| &self.bytes[of]);
        let all = of.is_none_or(|of| of + 1 < self.filters);
        let kept = self.kept.iter().map(move |kept| *kept || all);
        let travels = sizes.iter().zip(kept).filter(|(_, travels)| *travels);
        travels.map(|(size, _)| *size)
    }
}
