//! A scenario's networks as files, and operators in this process that use them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use compass_agent::operators::InProcess;
use compass_shared::model::catalogue::CatalogueEntry;
use compass_shared::model::pipeline::Configuration;

use super::scenario::ArtifactFile;

/// Files of networks by the catalogue's names.
#[derive(Debug)]
pub(super) struct Networks {
    paths: BTreeMap<String, PathBuf>,
    /// Where the built-in ones are; gone with this.
    _folder: tempfile::TempDir,
}

impl Networks {
    /// Writes those that are built in.
    pub(super) fn new(artifacts: &[(String, ArtifactFile)]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut paths = BTreeMap::new();
        for (name, file) in artifacts {
            let path = match file {
                ArtifactFile::Installed { path, .. } => path.clone(),
                ArtifactFile::BuiltIn(bytes) => {
                    let path = folder.path().join(name);
                    std::fs::write(&path, bytes)?;
                    path
                }
            };
            paths.insert(name.clone(), path);
        }
        Ok(Self {
            paths,
            _folder: folder,
        })
    }

    /// An operator in this configuration.
    pub(super) fn load(
        &self,
        entry: &CatalogueEntry,
        configuration: &Configuration,
    ) -> anyhow::Result<InProcess> {
        let artifact = match entry.artifact(configuration) {
            Some(choice) => {
                let path = self.paths.get(choice.name.as_str());
                Some(path.with_context(|| format!("no network {}", choice.name))?)
            }
            None => None,
        };
        InProcess::new(
            &entry.runtime,
            configuration,
            artifact.map(PathBuf::as_path),
        )
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("operator {} with {configuration}", entry.kind))
    }
}
