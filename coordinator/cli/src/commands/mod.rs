//! What each command does.

mod node;
mod pipeline;
mod query;
mod token;

use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::CommandFactory;
use compass_shared::api::{ArtifactView, EventView, Health, LinkView};
use compass_shared::ids::{ArtifactName, Digest};

use crate::arguments::{
    Arguments, Artifact, Command, Described, Global, Link, Listed, Node, Plan, Query, Token,
};
use crate::http::Api;
use crate::output::{self, Shown, age};

/// Between two prints of `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(2);

/// Largest file sent as an artifact.
const ARTIFACT_BYTES_MAX: u64 = 4 << 30;

pub(crate) fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { global, command } = arguments;
    if !global.watch {
        return once(&global, &command);
    }
    loop {
        if std::io::stdout().is_terminal() {
            // Clears the screen and goes to its top.
            print!("\x1b[2J\x1b[H");
        }
        once(&global, &command)?;
        std::thread::sleep(WATCH_EVERY);
    }
}

fn once(global: &Global, command: &Command) -> anyhow::Result<ExitCode> {
    // The two that need no coordinator.
    match command {
        Command::Completion { shell } => {
            clap_complete::generate(
                *shell,
                &mut Arguments::command(),
                "compass",
                &mut std::io::stdout(),
            );
            return Ok(ExitCode::SUCCESS);
        }
        Command::Pipeline(command) => return pipeline::run(global, command),
        _ => {}
    }
    let api = Api::new(global)?;
    match command {
        Command::Token(Token::List)
        | Command::Get {
            what: Listed::Tokens,
        } => token::list(global, &api)?,
        Command::Token(command) => token::run(global, &api, command)?,
        Command::Node(Node::List)
        | Command::Get {
            what: Listed::Nodes,
        } => node::list(global, &api)?,
        Command::Node(Node::Status { node })
        | Command::Describe {
            what: Described::Node,
            name: node,
        } => node::status(global, &api, node)?,
        Command::Node(command) => node::run(global, &api, command)?,
        Command::Query(Query::List)
        | Command::Get {
            what: Listed::Queries,
        } => query::list(global, &api)?,
        Command::Query(Query::Status { query })
        | Command::Describe {
            what: Described::Query,
            name: query,
        } => query::status(global, &api, query)?,
        Command::Query(Query::Register { file }) | Command::Apply { filename: file } => {
            query::register(global, &api, file)?
        }
        Command::Query(Query::Plan {
            file,
            detailed_exitcode,
        }) => return query::plan(global, &api, file, *detailed_exitcode),
        Command::Query(Query::Stop { query }) => query::stop(global, &api, query)?,
        Command::Plan(Plan::Show { query, generation }) => {
            query::show_plan(global, &api, query, *generation)?
        }
        Command::Plan(Plan::List { query }) => query::list_plans(global, &api, query)?,
        Command::Plan(Plan::Explain {
            query,
            generation,
            rejected,
        }) => query::explain(global, &api, query, *generation, *rejected)?,
        Command::Artifact(Artifact::Push { file, name }) => {
            push(global, &api, file, name.as_deref())?
        }
        Command::Artifact(Artifact::List)
        | Command::Get {
            what: Listed::Artifacts,
        } => artifacts(global, api.get("/v1/artifacts")?)?,
        Command::Link(Link::List)
        | Command::Get {
            what: Listed::Links,
        } => links(global, &api)?,
        Command::Health => health(global, &api)?,
        Command::Events { after } => events(global, &api, *after)?,
        Command::Get {
            what: Listed::Events,
        } => events(global, &api, 0)?,
        Command::Completion { .. } | Command::Pipeline(_) => unreachable!("handled above"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The one of `names` that `wanted` is, or is the beginning of.
pub(crate) fn by_prefix<'a>(
    kind: &str,
    wanted: &str,
    names: impl Iterator<Item = &'a str>,
) -> anyhow::Result<&'a str> {
    let names: Vec<&str> = names.collect();
    if let Some(name) = names.iter().find(|name| **name == wanted) {
        return Ok(name);
    }
    let beginning: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| name.starts_with(wanted))
        .collect();
    match beginning.as_slice() {
        [one] => Ok(one),
        [] if names.is_empty() => bail!("{kind} {wanted:?} does not exist; there is no {kind} yet"),
        [] => match compass_shared::spec::did_you_mean(wanted, names.iter().copied()) {
            Some(near) => bail!("{kind} {wanted:?} does not exist; did you mean {near:?}?"),
            None => bail!(
                "{kind} {wanted:?} does not exist; there are: {}",
                names.join(", ")
            ),
        },
        several => bail!("{kind} {wanted:?} could be any of: {}", several.join(", ")),
    }
}

/// Asks on a terminal; elsewhere wants `-y`.
pub(crate) fn confirm(global: &Global, question: &str) -> anyhow::Result<()> {
    if global.yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        bail!("{question} Pass -y to confirm.");
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        Ok(())
    } else {
        bail!("not confirmed, nothing was changed")
    }
}

/// A file's text; `-` is standard input.
pub(crate) fn read_text(file: &Path) -> anyhow::Result<String> {
    let limit = compass_shared::spec::SPEC_BYTES_MAX as u64 + 1;
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin()
            .lock()
            .take(limit)
            .read_to_string(&mut text)
            .context("cannot read standard input")?;
    } else {
        let opened =
            std::fs::File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
        opened
            .take(limit)
            .read_to_string(&mut text)
            .with_context(|| format!("cannot read {}", file.display()))?;
    }
    Ok(text)
}

fn health(global: &Global, api: &Api) -> anyhow::Result<()> {
    let health: Health = api.get("/healthz")?;
    let mut text = format!(
        "{}, term {}\nauthority  {}\n",
        if health.ok { "ok" } else { "NOT WELL" },
        health.term,
        health.authority
    );
    for trouble in &health.troubles {
        text.push_str(&format!("trouble    {trouble}\n"));
    }
    let authority = health.authority.to_string();
    output::print_text(global, &health, &authority, &text)
}

fn push(global: &Global, api: &Api, file: &Path, name: Option<&str>) -> anyhow::Result<()> {
    let stem = file.file_stem().and_then(|stem| stem.to_str());
    let name: ArtifactName = name
        .or(stem)
        .context("the file has no name; pass --name")?
        .parse()?;
    let size = std::fs::metadata(file)
        .with_context(|| format!("cannot read {}", file.display()))?
        .len();
    if size > ARTIFACT_BYTES_MAX {
        bail!(
            "{} has {size} bytes; an artifact has at most {ARTIFACT_BYTES_MAX}",
            file.display()
        );
    }
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let pushed: ArtifactView = api.put_bytes(&format!("/v1/artifacts/{name}"), &bytes)?;
    if pushed.digest != Digest::of(&bytes) {
        bail!(
            "the coordinator received something else than was sent ({} instead of {}); push again",
            pushed.digest,
            Digest::of(&bytes)
        );
    }
    artifacts(global, vec![pushed])
}

fn artifacts(global: &Global, artifacts: Vec<ArtifactView>) -> anyhow::Result<()> {
    let rows = artifacts
        .iter()
        .map(|a| {
            vec![
                a.name.to_string(),
                a.bytes.to_string(),
                a.digest.to_string(),
            ]
        })
        .collect();
    let names = artifacts.iter().map(|a| a.name.to_string()).collect();
    Shown {
        header: vec!["name", "bytes", "sha256"],
        narrow: 3,
        names,
        rows,
        data: artifacts,
    }
    .print(global)
}

fn links(global: &Global, api: &Api) -> anyhow::Result<()> {
    let links: Vec<LinkView> = api.get("/v1/links")?;
    let row = |link: &LinkView| {
        let bound = if link.lower_bound { ">=" } else { "" };
        vec![
            link.from.to_string(),
            link.to.to_string(),
            format!("{bound}{:.2} Mbit/s", link.bandwidth_mbit_s),
            format!("{:.1} ms", link.rtt_ms),
            format!("{:.1} %", link.loss * 100.0),
        ]
    };
    let names = links
        .iter()
        .map(|link| format!("{}->{}", link.from, link.to))
        .collect();
    let rows = links.iter().map(row).collect();
    Shown {
        header: vec!["from", "to", "bandwidth", "rtt", "loss"],
        narrow: 5,
        names,
        rows,
        data: links,
    }
    .print(global)
}

fn events(global: &Global, api: &Api, after: u64) -> anyhow::Result<()> {
    let events: Vec<EventView> = api.get(&format!("/v1/events?after={after}"))?;
    let row = |event: &EventView| {
        vec![
            event.sequence.to_string(),
            age(event.unix_ms),
            event.kind.clone(),
            event.object.clone(),
            event.message.clone(),
        ]
    };
    let names = events
        .iter()
        .map(|event| event.sequence.to_string())
        .collect();
    let rows = events.iter().map(row).collect();
    Shown {
        header: vec!["number", "age", "kind", "object", "message"],
        narrow: 5,
        names,
        rows,
        data: events,
    }
    .print(global)
}

#[cfg(test)]
mod tests {
    use super::by_prefix;

    #[test]
    fn names_are_found_by_prefix_and_near_misses_suggested() {
        let names = ["edge-1", "edge-12", "near-1"];
        let find = |wanted| by_prefix("node", wanted, names.into_iter());
        assert_eq!(
            find("edge-1").unwrap(),
            "edge-1",
            "a whole name wins over a longer one"
        );
        assert_eq!(find("n").unwrap(), "near-1");
        assert_eq!(
            find("edge").unwrap_err().to_string(),
            "node \"edge\" could be any of: edge-1, edge-12"
        );
        assert!(
            find("naer-1")
                .unwrap_err()
                .to_string()
                .contains("did you mean \"near-1\"")
        );
        assert!(
            find("zzz")
                .unwrap_err()
                .to_string()
                .contains("there are: edge-1")
        );
    }
}
