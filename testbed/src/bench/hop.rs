//! `bench hop`: what one hop between two nodes adds, beside bare quinn in the same run, and the hand-over to workers apart.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;

use super::awake::Awake;
use super::bare::BareEcho;
use super::chain::Chain;
use super::worker::HandOver;
use super::{Circumstances, HopArguments, Times, show};

/// Payloads: an answer, and a camera's frame as JPEG.
const SIZES: [Size; 2] = [
    Size {
        bytes: 1_000,
        aim: 2.0,
    },
    Size {
        bytes: 100_000,
        aim: 1.3,
    },
];

/// Exchanges before anything counts: packet sizes are probed for, windows open, caches fill.
const WARM_UP: usize = 200;

#[derive(Debug, Clone, Copy)]
struct Size {
    bytes: usize,
    /// The ratio of medians that is aimed at.
    aim: f64,
}

/// What came out.
#[derive(Debug, Serialize)]
struct Figures {
    circumstances: Circumstances,
    /// Rest before each exchange.
    pause_ms: u64,
    /// Whether idle cores were kept from sleeping.
    cores_kept_awake: bool,
    hops: Vec<HopFigures>,
    worker: Vec<WorkerFigures>,
}

#[derive(Debug, Serialize)]
struct HopFigures {
    payload_bytes: usize,
    /// From the output of an operator to its arrival at an operator on another node.
    hop: Times,
    /// Bare quinn: from before the stream is opened until the other side has read it whole.
    bare: Times,
    /// The same as half of a round trip with an echo.
    bare_half_echo: Times,
    ratio_p50: f64,
    ratio_p99: f64,
    aim_ratio_p50: f64,
}

#[derive(Debug, Serialize)]
struct WorkerFigures {
    payload_bytes: usize,
    /// To the worker and back.
    hand_over: Times,
}

pub(super) fn run(arguments: &HopArguments) -> anyhow::Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("compass-bench-")
        .tempdir()?;
    let seconds = Duration::from_secs(arguments.seconds);
    let pause = Duration::from_millis(arguments.pause_ms);
    let awake = (!arguments.let_cores_sleep).then(Awake::start);
    let hops = hops(folder.path(), seconds, pause)?;
    let worker = hand_over(folder.path(), seconds / 4)?;
    drop(awake);
    let figures = Figures {
        circumstances: Circumstances::now(),
        pause_ms: arguments.pause_ms,
        cores_kept_awake: !arguments.let_cores_sleep,
        hops,
        worker,
    };
    show(arguments.json.as_deref(), &figures, print)
}

/// One exchange of each kind in turn, so that whatever else the machine does meets all of them alike.
///
/// All begin from rest, as frames of a camera do: what an exchange still has to clear up (credits, acknowledgements, word to the app)
/// takes no core from the next one.
fn hops(
    folder: &std::path::Path,
    seconds: Duration,
    pause: Duration,
) -> anyhow::Result<Vec<HopFigures>> {
    let mut chain = Chain::start(folder, pause)?;
    let mut bare = BareEcho::start()?;
    let mut taken = SIZES.map(|size| (size, Taken::default()));
    let messages = SIZES.map(|size| Bytes::from(vec![7; size.bytes]));
    for _ in 0..WARM_UP {
        for (size, message) in SIZES.iter().zip(&messages) {
            chain.hop(size.bytes)?;
            bare.exchange(message.clone(), pause)?;
        }
    }
    let began = Instant::now();
    while began.elapsed() < seconds {
        for ((size, taken), message) in taken.iter_mut().zip(&messages) {
            taken.hop.push(chain.hop(size.bytes)?);
            let exchange = bare.exchange(message.clone(), pause)?;
            taken.bare.push(exchange.there);
            taken.half_echo.push(exchange.round_trip / 2);
        }
    }
    taken
        .iter()
        .map(|(size, taken)| taken.figures(*size))
        .collect()
}

#[derive(Debug, Default)]
struct Taken {
    hop: Vec<Duration>,
    bare: Vec<Duration>,
    half_echo: Vec<Duration>,
}

impl Taken {
    fn figures(&self, size: Size) -> anyhow::Result<HopFigures> {
        let (hop, bare) = (Times::of(&self.hop)?, Times::of(&self.bare)?);
        Ok(HopFigures {
            payload_bytes: size.bytes,
            hop,
            bare,
            bare_half_echo: Times::of(&self.half_echo)?,
            ratio_p50: hop.p50_us / bare.p50_us,
            ratio_p99: hop.p99_us / bare.p99_us,
            aim_ratio_p50: size.aim,
        })
    }
}

fn hand_over(folder: &std::path::Path, seconds: Duration) -> anyhow::Result<Vec<WorkerFigures>> {
    let sizes = SIZES.map(|size| size.bytes);
    let mut over = HandOver::start(folder, &sizes)?;
    let mut taken = sizes.map(|size| (size, Vec::new()));
    for _ in 0..WARM_UP {
        for size in sizes {
            over.pass(size)?;
        }
    }
    let began = Instant::now();
    while began.elapsed() < seconds {
        for (size, times) in &mut taken {
            times.push(over.pass(*size)?);
        }
    }
    let figures = taken.iter().map(|(size, times)| {
        Ok(WorkerFigures {
            payload_bytes: *size,
            hand_over: Times::of(times)?,
        })
    });
    figures.collect()
}

fn print(figures: &Figures) {
    println!(
        "one hop between two nodes; {} ms of rest before each; {}",
        figures.pause_ms, figures.circumstances
    );
    println!("  payload        hop p50      p99    bare p50      p99   ratio p50 (aim)   p99");
    for hop in &figures.hops {
        println!(
            "{:>7} B   {:>9.0} us {:>7.0}   {:>9.0} {:>8.0}   {:>9.2} (≤ {:.1}) {:>5.2}",
            hop.payload_bytes,
            hop.hop.p50_us,
            hop.hop.p99_us,
            hop.bare.p50_us,
            hop.bare.p99_us,
            hop.ratio_p50,
            hop.aim_ratio_p50,
            hop.ratio_p99,
        );
    }
    for hop in &figures.hops {
        println!(
            "{:>7} B   {} samples; half of a bare echo's round trip: p50 {:.0} us, p99 {:.0} us",
            hop.payload_bytes,
            hop.hop.samples,
            hop.bare_half_echo.p50_us,
            hop.bare_half_echo.p99_us
        );
    }
    println!("hand-over to a worker and back");
    for worker in &figures.worker {
        println!(
            "{:>7} B   p50 {:.0} us, p99 {:.0} us ({} samples)",
            worker.payload_bytes,
            worker.hand_over.p50_us,
            worker.hand_over.p99_us,
            worker.hand_over.samples
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_quantile() {
        let micros = |numbers: std::ops::RangeInclusive<u64>, factor: u64| {
            numbers
                .map(|n| Duration::from_micros(n * factor))
                .collect::<Vec<_>>()
        };
        let taken = Taken {
            hop: micros(1..=100, 3),
            bare: micros(1..=100, 2),
            half_echo: micros(1..=100, 2),
        };
        let figures = taken.figures(SIZES[0]).unwrap();
        assert!((figures.ratio_p50 - 1.5).abs() < 1e-9);
        assert!((figures.ratio_p99 - 1.5).abs() < 1e-9);
        assert!(Taken::default().figures(SIZES[0]).is_err());
    }
}
