//! Which coordinator to talk to, and as whom: options, then environment, then the configuration file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::arguments::Global;

/// `~/.config/compass/config.toml`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    /// The context used when none is named.
    default: Option<String>,
    /// Contexts by name.
    #[serde(default)]
    context: BTreeMap<String, ContextEntry>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextEntry {
    addr: String,
    token_file: Option<PathBuf>,
}

/// Where and as whom.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) addr: String,
    pub(crate) token: Option<String>,
}

pub(crate) fn resolve(global: &Global) -> anyhow::Result<Target> {
    let file = read_file()?;
    let name = global.context.clone().or(file.default);
    let entry = match &name {
        Some(name) => Some(file.context.get(name).with_context(|| {
            let known: Vec<_> = file.context.keys().map(String::as_str).collect();
            format!(
                "there is no context {name:?}; the configuration has: {}",
                known.join(", ")
            )
        })?),
        None => None,
    };
    let addr = global
        .addr
        .clone()
        .or_else(|| entry.map(|e| e.addr.clone()));
    let Some(addr) = addr else {
        bail!(
            "no coordinator is named: set COMPASS_ADDR (the coordinator prints its http address when it is ready), or pass --addr"
        );
    };
    let addr = if addr.contains("://") {
        addr
    } else {
        format!("http://{addr}")
    };
    let token_file = global
        .token_file
        .clone()
        .or_else(|| entry.and_then(|e| e.token_file.clone()));
    let token = match (std::env::var("COMPASS_TOKEN"), token_file) {
        (Ok(token), _) => Some(token),
        (Err(_), Some(path)) => {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read the token file {}", path.display()))?;
            Some(text.trim().to_owned())
        }
        (Err(_), None) => None,
    };
    Ok(Target {
        addr: addr.trim_end_matches('/').to_owned(),
        token,
    })
}

fn read_file() -> anyhow::Result<ConfigFile> {
    let folder = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".config")));
    let Some(path) = folder
        .map(|folder| folder.join("compass/config.toml"))
        .filter(|path| path.exists())
    else {
        return Ok(ConfigFile::default());
    };
    Ok(compass_shared::settings::load(&path)?)
}
