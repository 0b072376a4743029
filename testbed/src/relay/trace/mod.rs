//! Bandwidth traces: the file format, checked as it is read, and the arithmetic of replaying one for ever.
//!
//! A trace file is CSV with the header `time_s,bandwidth_mbps` or `time_s,bandwidth_mbps,rtt_ms`. Times are seconds, begin
//! at 0 and increase; each row holds until the next; the last holds as long as the one before it. Bandwidth is in Mbit/s
//! (0 is an outage), the optional round-trip time in ms. Lines that begin with `#` and blank lines are skipped.
//!
//! [`synthesis`] writes such files with the statistics of mobile links; nothing is downloaded.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::rate::from_nanos;

pub mod command;
pub mod synthesis;

/// A trace of this many rows is 11 days at one row per second; more is a mistake.
const ROWS_MAX: usize = 1_000_000;

/// Faster than any link this emulator can carry; a larger number is a wrong unit.
const BANDWIDTH_MBPS_MAX: f64 = 1_000_000.0;

/// Larger round-trip times are a wrong unit.
const RTT_MS_MAX: f64 = 60_000.0;

/// Later times are a wrong unit (a year).
const TIME_S_MAX: f64 = 31_536_000.0;

/// One row: what holds from `start` until the next row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Since the beginning of the trace.
    pub start: Duration,
    /// Bits per second.
    pub rate_bps: u64,
    /// Round-trip time of the link, if the trace has it.
    pub rtt: Option<Duration>,
}

/// A checked trace: at least two rows, some bandwidth somewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    steps: Vec<Step>,
    duration: Duration,
    /// Work (bits × 10⁹) done before each step begins; one more entry for the whole loop.
    work_before: Vec<u128>,
}

/// Why a trace was refused.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error("cannot read trace {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not as the format demands.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The trace as a whole cannot be replayed.
    #[error("{0}")]
    Whole(&'static str),
    /// A fault in a named file.
    #[error("trace {}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: Box<TraceError>,
    },
}

impl Trace {
    /// Reads and checks a trace file.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        let text = std::fs::read_to_string(path).map_err(|source| TraceError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|source| TraceError::In {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Reads and checks the text of a trace file.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line.trim()))
            .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let (line, header) = lines
            .next()
            .ok_or(TraceError::Whole("the trace is empty"))?;
        let columns: Vec<&str> = header
            .trim_start_matches('\u{feff}')
            .split(',')
            .map(str::trim)
            .collect();
        let with_rtt = match columns.as_slice() {
            ["time_s", "bandwidth_mbps"] => false,
            ["time_s", "bandwidth_mbps", "rtt_ms"] => true,
            _ => {
                let what = format!(
                    "the header must be time_s,bandwidth_mbps[,rtt_ms], not `{}`",
                    shorten(header)
                );
                return Err(TraceError::Line { line, what });
            }
        };
        let mut steps: Vec<Step> = Vec::new();
        for (line, row) in lines {
            let step = parse_row(row, with_rtt).map_err(|what| TraceError::Line { line, what })?;
            check_order(steps.last(), &step).map_err(|what| TraceError::Line { line, what })?;
            if steps.len() == ROWS_MAX {
                return Err(TraceError::Line {
                    line,
                    what: format!("more than {ROWS_MAX} rows"),
                });
            }
            steps.push(step);
        }
        Self::from_steps(steps)
    }

    /// Puts rows together; they must begin at zero, increase, and carry something.
    pub fn from_steps(steps: Vec<Step>) -> Result<Self, TraceError> {
        let [.., before_last, last] = steps.as_slice() else {
            return Err(TraceError::Whole("a trace needs at least two rows"));
        };
        let increasing = steps.windows(2).all(|pair| pair[0].start < pair[1].start);
        if steps[0].start != Duration::ZERO || !increasing {
            return Err(TraceError::Whole("times must begin at 0 and increase"));
        }
        if steps.iter().all(|step| step.rate_bps == 0) {
            return Err(TraceError::Whole(
                "the bandwidth is 0 throughout: nothing would ever arrive",
            ));
        }
        let duration = last.start + (last.start - before_last.start);
        let mut work_before = vec![0];
        let mut total = 0;
        for (index, step) in steps.iter().enumerate() {
            let end = steps.get(index + 1).map_or(duration, |next| next.start);
            total += u128::from(step.rate_bps) * (end - step.start).as_nanos();
            work_before.push(total);
        }
        Ok(Self {
            steps,
            duration,
            work_before,
        })
    }

    /// The rows.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The length of one loop.
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// Time-weighted mean of the bandwidth, in bits per second.
    pub fn mean_bps(&self) -> f64 {
        self.loop_work() as f64 / self.duration.as_nanos() as f64
    }

    /// The same trace with every bandwidth multiplied by `factor` (positive, finite).
    pub fn scaled(&self, factor: f64) -> Result<Self, TraceError> {
        if !(factor.is_finite() && factor > 0.0) {
            return Err(TraceError::Whole("the scale must be a positive number"));
        }
        let scale = |step: &Step| Step {
            rate_bps: (step.rate_bps as f64 * factor).round() as u64,
            ..*step
        };
        Self::from_steps(self.steps.iter().map(scale).collect())
    }

    /// The file form of this trace, under comment lines.
    pub fn to_csv(&self, comments: &[&str]) -> String {
        let with_rtt = self.steps.iter().all(|step| step.rtt.is_some());
        let mut text = String::new();
        for comment in comments {
            text += &format!("# {comment}\n");
        }
        text += if with_rtt {
            "time_s,bandwidth_mbps,rtt_ms\n"
        } else {
            "time_s,bandwidth_mbps\n"
        };
        for step in &self.steps {
            text += &format!(
                "{},{}",
                step.start.as_secs_f64(),
                step.rate_bps as f64 / 1e6
            );
            if let Some(rtt) = step.rtt.filter(|_| with_rtt) {
                text += &format!(",{}", rtt.as_secs_f64() * 1e3);
            }
            text.push('\n');
        }
        text
    }

    /// The row that holds at a position inside the loop.
    pub(super) fn step_at(&self, position: Duration) -> &Step {
        let after = self.steps.partition_point(|step| step.start <= position);
        &self.steps[after - 1]
    }

    /// Work done by a never idle pipe from the trace's beginning until `at`, over as many loops as that takes.
    pub(super) fn work_until(&self, at: Duration) -> u128 {
        let (loops, position) = (
            at.as_nanos() / self.duration.as_nanos(),
            at.as_nanos() % self.duration.as_nanos(),
        );
        let position = from_nanos(position);
        let index = self.steps.partition_point(|step| step.start <= position) - 1;
        let step = &self.steps[index];
        let within = u128::from(step.rate_bps) * (position - step.start).as_nanos();
        loops * self.loop_work() + self.work_before[index] + within
    }

    /// The first moment by which that much work has been done since the trace's beginning.
    pub(super) fn time_of_work(&self, work: u128) -> Duration {
        if work == 0 {
            return Duration::ZERO;
        }
        // The last unit of work falls into this loop and step: none of them is complete before it.
        let (loops, rest) = (
            (work - 1) / self.loop_work(),
            (work - 1) % self.loop_work() + 1,
        );
        let index = self.work_before.partition_point(|before| *before < rest) - 1;
        let step = &self.steps[index];
        let within = (rest - self.work_before[index]).div_ceil(u128::from(step.rate_bps));
        from_nanos(loops * self.duration.as_nanos() + step.start.as_nanos() + within)
    }

    fn loop_work(&self) -> u128 {
        *self
            .work_before
            .last()
            .expect("one entry per step and one more")
    }
}

fn parse_row(row: &str, with_rtt: bool) -> Result<Step, String> {
    let fields: Vec<&str> = row.split(',').map(str::trim).collect();
    let expected = if with_rtt { 3 } else { 2 };
    if fields.len() != expected {
        return Err(format!(
            "{} columns where the header has {expected}",
            fields.len()
        ));
    }
    let time_s = parse_number("time_s", fields[0], TIME_S_MAX)?;
    let bandwidth_mbps = parse_number("bandwidth_mbps", fields[1], BANDWIDTH_MBPS_MAX)?;
    let rtt_ms = fields
        .get(2)
        .map(|field| parse_number("rtt_ms", field, RTT_MS_MAX))
        .transpose()?;
    Ok(Step {
        start: Duration::from_secs_f64(time_s),
        rate_bps: (bandwidth_mbps * 1e6).round() as u64,
        rtt: rtt_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
    })
}

fn parse_number(column: &str, field: &str, max: f64) -> Result<f64, String> {
    let value: f64 = field
        .parse()
        .map_err(|_| format!("{column} `{}` is not a number", shorten(field)))?;
    if !(0.0..=max).contains(&value) {
        return Err(format!("{column} {value} is not between 0 and {max}"));
    }
    Ok(value)
}

fn check_order(previous: Option<&Step>, step: &Step) -> Result<(), String> {
    let seconds = step.start.as_secs_f64();
    match previous {
        None if step.start != Duration::ZERO => {
            Err(format!("the first time must be 0, not {seconds}"))
        }
        Some(previous) if step.start <= previous.start => Err(format!(
            "time {seconds} does not come after {}",
            previous.start.as_secs_f64()
        )),
        _ => Ok(()),
    }
}

/// At most 60 characters of a foreign text, for a message.
fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        Trace::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_trace_survives_writing_and_reading() {
        let text = "# seed 7\r\ntime_s,bandwidth_mbps,rtt_ms\r\n0,4.038,61.5\r\n\r\n0.55,0,80\r\n1.5,12,40\r\n";
        let trace = Trace::parse(text).unwrap();
        assert_eq!(trace.steps()[0].rate_bps, 4_038_000);
        assert_eq!(
            trace.duration(),
            Duration::from_millis(2_450),
            "the last row holds as long as the one before it"
        );
        assert_eq!(
            Trace::parse(&trace.to_csv(&["written", "again"])).unwrap(),
            trace
        );
    }

    #[test]
    fn mean_and_scale_are_weighted_by_time() {
        let trace = Trace::parse("time_s,bandwidth_mbps\n0,8\n1,0\n3,4\n").unwrap();
        assert!((trace.mean_bps() - 16e6 / 5.0).abs() < 1.0);
        assert!((trace.scaled(0.5).unwrap().mean_bps() - 8e6 / 5.0).abs() < 1.0);
        assert!(trace.scaled(f64::NAN).is_err());
    }

    #[test]
    fn a_bad_line_is_named_with_its_number() {
        let head = "time_s,bandwidth_mbps\n0,1\n";
        for (text, expected) in [
            (
                "time,bandwidth\n0,1\n1,1\n",
                "line 1: the header must be time_s,bandwidth_mbps[,rtt_ms], not `time,bandwidth`",
            ),
            (
                "time_s,bandwidth_mbps\n0,1\n1\n",
                "line 3: 1 columns where the header has 2",
            ),
            (
                "time_s,bandwidth_mbps,rtt_ms\n0,1\n",
                "line 2: 2 columns where the header has 3",
            ),
            (
                &format!("{head}1,fast\n"),
                "line 3: bandwidth_mbps `fast` is not a number",
            ),
            (
                &format!("{head}1,NaN\n"),
                "line 3: bandwidth_mbps NaN is not between 0 and 1000000",
            ),
            (
                &format!("{head}1,-2\n"),
                "line 3: bandwidth_mbps -2 is not between 0 and 1000000",
            ),
            (
                &format!("{head}1,inf\n"),
                "line 3: bandwidth_mbps inf is not between 0 and 1000000",
            ),
            (
                &format!("{head}# note\n0,1\n"),
                "line 4: time 0 does not come after 0",
            ),
            (
                "time_s,bandwidth_mbps\n5,1\n6,1\n",
                "line 2: the first time must be 0, not 5",
            ),
            ("", "the trace is empty"),
            (head, "a trace needs at least two rows"),
            (
                "time_s,bandwidth_mbps\n0,0\n1,0\n",
                "the bandwidth is 0 throughout: nothing would ever arrive",
            ),
        ] {
            assert_eq!(refusal(text), expected, "for {text:?}");
        }
    }

    #[test]
    fn a_file_that_is_missing_or_broken_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("uplink.csv");
        assert!(
            Trace::load(&path)
                .unwrap_err()
                .to_string()
                .contains("uplink.csv")
        );
        std::fs::write(&path, "time_s,bandwidth_mbps\n0,x\n").unwrap();
        let error = anyhow::Error::from(Trace::load(&path).unwrap_err());
        assert!(
            format!("{error:#}").contains("uplink.csv: line 2: bandwidth_mbps `x` is not a number"),
            "{error:#}"
        );
    }
}
