//! What can be typed: noun verb, with the reflexes of kubectl as aliases.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Plan and run compound AI queries over edge and cloud.
#[derive(Debug, Parser)]
#[command(
    name = "compass",
    version,
    propagate_version = true,
    max_term_width = 120
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// The coordinator's HTTP address, e.g. http://127.0.0.1:7480
    #[arg(long, env = "COMPASS_ADDR", global = true)]
    pub(crate) addr: Option<String>,
    /// File with a bearer token (the token itself can be in COMPASS_TOKEN)
    #[arg(long, env = "COMPASS_TOKEN_FILE", global = true)]
    pub(crate) token_file: Option<PathBuf>,
    /// A context of ~/.config/compass/config.toml
    #[arg(long, env = "COMPASS_CONTEXT", global = true)]
    pub(crate) context: Option<String>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Table, global = true)]
    pub(crate) output: Format,
    /// Print again every two seconds until interrupted
    #[arg(short, long, global = true)]
    pub(crate) watch: bool,
    /// Print nothing but errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Plain text
    #[arg(long, env = "NO_COLOR", value_parser = clap::builder::FalseyValueParser::new(), global = true)]
    pub(crate) no_color: bool,
    /// Give up after this long, e.g. 10s
    #[arg(long, default_value = "30s", value_parser = duration, global = true)]
    pub(crate) timeout: std::time::Duration,
    /// Do not ask
    #[arg(short, long, global = true)]
    pub(crate) yes: bool,
}

fn duration(text: &str) -> Result<std::time::Duration, String> {
    text.parse::<compass_shared::spec::quantity::WrittenDuration>()
        .map(|d| d.0)
}

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Wide,
    Json,
    Yaml,
    Name,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Join tokens for nodes and bearer tokens for programs
    #[command(subcommand)]
    Token(Token),
    /// The machines of the fleet
    #[command(subcommand, alias = "nodes")]
    Node(Node),
    /// Standing and one-shot requests
    #[command(subcommand, alias = "queries")]
    Query(Query),
    /// What runs where, and why
    #[command(subcommand, alias = "plans")]
    Plan(Plan),
    /// Files that describe pipelines
    #[command(subcommand)]
    Pipeline(Pipeline),
    /// Model files
    #[command(subcommand)]
    Artifact(Artifact),
    /// Links between nodes
    #[command(subcommand)]
    Link(Link),
    /// What happened
    Events {
        /// Only events after this number
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Whether the coordinator works, and its authority's fingerprint (`-o name` prints that alone)
    Health,
    /// List things: `compass get nodes`
    Get {
        #[arg(value_enum)]
        what: Listed,
    },
    /// Show one thing: `compass describe query lobby-agent`
    Describe {
        #[arg(value_enum)]
        what: Described,
        name: String,
    },
    /// Register what a file describes: `compass apply -f query.yaml`
    Apply {
        /// The file, or - for standard input
        #[arg(short, long)]
        filename: PathBuf,
    },
    /// Print a completion script for a shell
    Completion {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Listed {
    #[value(alias = "node")]
    Nodes,
    #[value(alias = "query")]
    Queries,
    #[value(alias = "link")]
    Links,
    #[value(alias = "token")]
    Tokens,
    #[value(alias = "artifact")]
    Artifacts,
    Events,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Described {
    Node,
    Query,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Token {
    /// Make a token: `--node edge-7` to let a node join, `--role app` for a program
    Create {
        /// The node that may join with it
        #[arg(long, required_unless_present = "role", conflicts_with = "role")]
        node: Option<String>,
        /// What its bearer may do
        #[arg(long, value_enum)]
        role: Option<RoleName>,
        /// Valid for this long
        #[arg(long, default_value = "30m", value_parser = ttl)]
        ttl: std::time::Duration,
        /// How many nodes' keys may use it (joining only)
        #[arg(long, default_value_t = 1)]
        uses: u32,
    },
    /// List tokens without their secrets
    List,
    /// Make a token worthless
    Revoke { id: String },
}

/// `30m` means minutes here, as in the tools people know; a bare number or `m` elsewhere stays an error.
fn ttl(text: &str) -> Result<std::time::Duration, String> {
    match text
        .strip_suffix('m')
        .filter(|minutes| minutes.chars().all(|c| c.is_ascii_digit()))
    {
        Some(minutes) if !minutes.is_empty() => duration(&format!("{minutes}min")),
        _ => duration(text),
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RoleName {
    Viewer,
    App,
    Operator,
    Admin,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Node {
    /// List nodes
    #[command(alias = "ls")]
    List,
    /// Everything about one node
    Status { node: String },
    /// Move its work away and give it no more
    Drain {
        node: String,
        /// Kept in the audit log
        #[arg(long)]
        reason: Option<String>,
    },
    /// Give it no more work
    Cordon {
        node: String,
        /// Kept in the audit log
        #[arg(long)]
        reason: Option<String>,
    },
    /// Give it work again
    Uncordon { node: String },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Query {
    /// Register the query of a file (the same file again changes nothing)
    Register {
        /// The file, or - for standard input
        file: PathBuf,
    },
    /// List queries
    #[command(alias = "ls")]
    List,
    /// Live SLOs, plan and frames of one query
    Status { query: String },
    /// Dry run: what would this file get?
    Plan {
        /// The file, or - for standard input
        file: PathBuf,
        /// Exit 0 for no change, 2 for a change, 3 for infeasible
        #[arg(long)]
        detailed_exitcode: bool,
    },
    /// Withdraw a query
    Stop { query: String },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Plan {
    /// Show the plan in force, or one generation
    Show {
        query: String,
        #[arg(long)]
        generation: Option<u64>,
    },
    /// Why is the plan as it is?
    Explain {
        query: String,
        #[arg(long)]
        generation: Option<u64>,
        /// Show this many rejected candidates
        #[arg(long, default_value_t = 3)]
        rejected: usize,
    },
    /// All plans of a query
    List { query: String },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Pipeline {
    /// Check a pipeline file (or a query file with inline operators)
    Validate {
        file: PathBuf,
        /// Check against this catalogue instead of the coordinator's
        #[arg(long)]
        catalogue: Option<PathBuf>,
    },
    /// Draw a pipeline file
    Graph {
        file: PathBuf,
        /// Check against this catalogue instead of the coordinator's
        #[arg(long)]
        catalogue: Option<PathBuf>,
        /// Graphviz instead of text
        #[arg(long)]
        dot: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Artifact {
    /// Hand a model file to the coordinator
    Push {
        file: PathBuf,
        /// Its name; the file's name without its extension when absent
        #[arg(long)]
        name: Option<String>,
    },
    /// List model files
    List,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Link {
    /// List links as the planner sees them
    List,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_ttl_in_minutes_is_what_people_mean() {
        assert_eq!(ttl("30m").unwrap().as_secs(), 1800);
        assert_eq!(ttl("2h").unwrap().as_secs(), 7200);
        assert!(ttl("30").is_err());
        assert!(ttl("m").is_err());
    }
}
