//! The worker's side: a process of its own that takes on its limits and then serves requests on one thread, without a runtime.
//!
//! Start at [`worker_main`].

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use compass_shared::model::telemetry::Enforcement;
use rustix::process::{Resource, Rlimit, Signal};
use rustix::time::ClockId;

use super::protocol::{self, Answer, InputHeader, PROTOCOL, Request, Start};
use crate::limits::group;
use crate::limits::in_force::{self, AppliedLimits, PromisedLimits};
use crate::operators::{self, Input, Operator, Produced};
use crate::telemetry::Root;

const MIB: u64 = 1024 * 1024;

/// What the command line says.
#[derive(Debug, Default, PartialEq)]
struct Options {
    memory_mib: Option<u64>,
    nice: Option<i32>,
    parent: Option<i32>,
    /// The control group to join, and the share in cores it promises.
    cgroup: Option<PathBuf>,
    cpu_cores: Option<f64>,
    exec: Vec<OsString>,
}

/// The entry of `compass-agent worker`; `arguments` are those after `worker`. Must run before any other thread is started.
pub fn worker_main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = parse(arguments).and_then(|options| {
        let confined =
            confine(&options).map_err(|e| format!("the worker cannot take on its limits: {e}"))?;
        protocol::send_blocking(&mut io::stdout().lock(), &confined, &[])
            .map_err(|e| format!("the worker lost its agent: {e}"))?;
        match options.exec.split_first() {
            Some((program, arguments)) => {
                let error = Command::new(program).args(arguments).exec();
                Err(format!("{} cannot be started: {error}", program.display()))
            }
            None => serve(&mut io::stdin().lock(), &mut io::stdout().lock())
                .map_err(|e| format!("the worker lost its agent: {e}")),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Options, String> {
    let mut options = Options::default();
    let mut arguments = arguments.into_iter();
    while let Some(name) = arguments.next() {
        let name = name.to_string_lossy().into_owned();
        if name == "--exec" {
            options.exec = arguments.collect();
            if options.exec.is_empty() {
                return Err("--exec needs a program".to_owned());
            }
            break;
        }
        let value = arguments
            .next()
            .and_then(|value| value.into_string().ok())
            .ok_or_else(|| format!("{name} needs a value"))?;
        let wrong = |_| format!("{name} needs a number, not {value:?}");
        match name.as_str() {
            "--memory-mib" => options.memory_mib = Some(value.parse().map_err(wrong)?),
            "--nice" => options.nice = Some(value.parse().map_err(wrong)?),
            "--cgroup" => options.cgroup = Some(value.into()),
            "--cpu-cores" => {
                let cores = value.parse();
                options.cpu_cores = Some(cores.map_err(|_| format!("{name} needs a number"))?);
            }
            "--parent" => options.parent = Some(value.parse().map_err(wrong)?),
            _ => {
                return Err(format!(
                    "a worker has no option {name}; workers are started by the agent"
                ));
            }
        }
    }
    Ok(options)
}

/// Gives up what a worker must not have, and looks whether it is really gone. What is set here stays over an `exec`.
fn confine(options: &Options) -> io::Result<Answer> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if let Some(parent) = options.parent
        && rustix::process::getppid().map(|p| p.as_raw_nonzero().get()) != Some(parent)
    {
        return Err(io::Error::other("the agent that started it is gone"));
    }
    let joined = options.cgroup.as_deref().map(group::join);
    rustix::thread::set_no_new_privs(true)?;
    close_inherited_descriptors()?;
    let bounded = |bytes| Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    rustix::process::setrlimit(Resource::Core, bounded(0))?;
    let mut promised = PromisedLimits::default();
    if let Some(memory_mib) = options.memory_mib {
        let cap = memory_mib.saturating_mul(MIB);
        // Of private writable memory, not of addresses: programs may reserve those by the terabyte (GPU runtimes do) without using
        // memory. For an operator of ours, beyond what this program has taken already; a foreign program begins from nothing.
        let taken = if options.exec.is_empty() {
            memory_taken()?
        } else {
            0
        };
        let bytes = taken.saturating_add(cap);
        rustix::process::setrlimit(Resource::Data, bounded(bytes))?;
        promised.memory_bytes = Some(bytes);
    }
    if let Some(nice) = options.nice {
        rustix::process::nice(nice)?;
    }
    // Should the host itself run out of memory, workers go before the agent. Raising the score is always allowed, where there is one.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    promised.cpu_cores = options.cpu_cores.filter(|_| joined.is_some());
    let broken = in_force::compare(&promised, &AppliedLimits::read(&Root::default()));
    let arranged = if matches!(joined, Some(Ok(()))) {
        Enforcement::Enforced
    } else {
        Enforcement::BestEffort
    };
    let failed = joined.and_then(Result::err);
    Ok(Answer::Confined {
        cpu_enforced: in_force::enforcement(arranged, &broken) == Enforcement::Enforced,
        memory_bytes: promised.memory_bytes,
        broken: (failed
            .iter()
            .map(|e| format!("its control group cannot be joined: {e}")))
        .chain(broken.iter().map(ToString::to_string))
        .collect(),
    })
}

/// Private writable memory mapped now, in bytes.
fn memory_taken() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Option<u64> = text.split_whitespace().nth(5).and_then(|n| n.parse().ok());
    let pages = pages.ok_or_else(|| io::Error::other("/proc/self/statm cannot be read"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Closes what the agent's own parent may have left open in it.
fn close_inherited_descriptors() -> io::Result<()> {
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    // The folder's own descriptor was among them and is closed by now.
    let still_open = |fd: &i32| Path::new(&format!("/proc/self/fd/{fd}")).is_symlink();
    for fd in open.into_iter().filter(still_open) {
        #[expect(
            unsafe_code,
            reason = "the process has just started and runs one thread: nothing in it owns these descriptors"
        )]
        // SAFETY: see the reason above.
        unsafe {
            rustix::io::close(fd);
        }
    }
    Ok(())
}

/// Answers requests until the input ends.
fn serve(input: &mut impl io::Read, output: &mut impl io::Write) -> io::Result<()> {
    let mut operator: Option<Box<dyn Operator>> = None;
    let mut started: Option<Start> = None;
    let mut payload = Vec::new();
    while let Some(request) = protocol::receive_blocking(input, &mut payload)? {
        if let Request::Start(start) = &request {
            started = Some(start.clone());
        }
        let answered = catch_unwind(AssertUnwindSafe(|| {
            answer(&mut operator, request, &payload)
        }));
        let (answer, bytes) = answered.unwrap_or_else(|_| {
            // A defect met by this frame; what it left behind is not to be trusted.
            operator = started.as_ref().and_then(|s| operators::build(s).ok());
            let message = "the operator panicked over this input".to_owned();
            (Answer::Error { message }, Vec::new())
        });
        protocol::send_blocking(output, &answer, &bytes)?;
    }
    Ok(())
}

fn answer(
    operator: &mut Option<Box<dyn Operator>>,
    request: Request,
    payload: &[u8],
) -> (Answer, Vec<u8>) {
    let outcome = match (request, operator.as_mut()) {
        (Request::Start(start), _) if start.protocol != PROTOCOL => {
            Err(format!("protocol {} is not known here", start.protocol))
        }
        (Request::Start(start), _) => {
            operators::build(&start)
                .map_err(|e| e.to_string())
                .map(|built| {
                    let payload = built.wants_payload();
                    *operator = Some(built);
                    (Answer::Ready { payload }, Vec::new())
                })
        }
        (_, None) => Err("the first request must be a start".to_owned()),
        (
            Request::Frame {
                query,
                frame,
                inputs,
            },
            Some(operator),
        ) => frame_answer(operator.as_mut(), &query, frame, &inputs, payload),
        (Request::Snapshot { query }, Some(operator)) => operator
            .snapshot(&query)
            .map(|state| (Answer::State, state))
            .map_err(|e| e.to_string()),
        (Request::Restore { query }, Some(operator)) => operator
            .restore(&query, payload)
            .map(|()| (Answer::Done, Vec::new()))
            .map_err(|e| e.to_string()),
        (Request::Reset { query }, Some(operator)) => {
            operator.reset(&query);
            Ok((Answer::Done, Vec::new()))
        }
    };
    outcome.unwrap_or_else(|message| (Answer::Error { message }, Vec::new()))
}

fn frame_answer(
    operator: &mut dyn Operator,
    query: &str,
    frame: u64,
    headers: &[InputHeader],
    payload: &[u8],
) -> Result<(Answer, Vec<u8>), String> {
    let mut inputs = Vec::with_capacity(headers.len());
    let mut rest = payload;
    for header in headers {
        let bytes = if operator.wants_payload() {
            rest.split_off(..header.bytes as usize)
                .ok_or("the payload is shorter than its inputs")?
        } else {
            &[]
        };
        inputs.push(Input {
            content: &header.content,
            bytes,
        });
    }
    let before = cpu_time();
    let produced = operator.process(query, frame, &inputs);
    // All threads: an inference engine may compute on one of its own.
    let cpu_us = Some(u64::try_from((cpu_time() - before).as_micros()).unwrap_or(u64::MAX));
    match produced.map_err(|e| e.to_string())? {
        Produced::Payload { content, bytes } => Ok((Answer::Output { content, cpu_us }, bytes)),
        Produced::Forward(input) => Ok((Answer::Forward { input, cpu_us }, Vec::new())),
        Produced::Skipped => Ok((Answer::Skipped { cpu_us }, Vec::new())),
    }
}

fn cpu_time() -> Duration {
    operators::cpu_time(ClockId::ProcessCPUTime)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Result<Options, String> {
        parse(text.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_command_line_is_strict() {
        let options =
            arguments("--memory-mib 64 --nice 5 --parent 12 --exec sh -c --nice").unwrap();
        assert_eq!(
            (options.memory_mib, options.nice, options.parent),
            (Some(64), Some(5), Some(12))
        );
        assert_eq!(options.exec, ["sh", "-c", "--nice"]);
        for wrong in [
            "--exec",
            "--memory-mib",
            "--memory-mib much",
            "--colour red",
        ] {
            assert!(arguments(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_worker_asked_out_of_order_answers_with_an_error() {
        let mut input = Vec::new();
        let header = br#"{"do":"reset","query":"q"}"#;
        input.extend_from_slice(&[0, 0, 0, header.len() as u8, 0, 0, 0, 0]);
        input.extend_from_slice(header);
        let mut output = Vec::new();
        serve(&mut &input[..], &mut output).unwrap();
        let text = String::from_utf8_lossy(&output[8..]);
        assert_eq!(
            text,
            r#"{"is":"error","message":"the first request must be a start"}"#
        );
    }
}
