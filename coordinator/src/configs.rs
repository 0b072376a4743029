//! Catalogue, pipelines and prices: from a folder, or the ones built in.
//!
//! A folder holds `catalogue.yaml`, `prices.yaml` and `pipelines/*.yaml`; a file that is not there is replaced by the built-in one, a file
//! that is wrong stops the start. Nothing here is ever written by a query: commands, endpoints and model paths come from these files only.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use compass_shared::ids::PipelineName;
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::PriceSheet;
use compass_shared::model::pipeline::Pipeline;
use compass_shared::spec::SpecError;
use compass_shared::spec::documents::{parse_catalogue, parse_pipeline, parse_prices};

/// What administrators write.
#[derive(Debug, Clone)]
pub struct Configs {
    /// Operator kinds.
    pub catalogue: Arc<Catalogue>,
    /// Named pipelines over them.
    pub pipelines: Arc<BTreeMap<PipelineName, Pipeline>>,
    /// What things cost.
    pub prices: PriceSheet,
}

/// A file and its text.
struct Source {
    name: String,
    text: String,
}

impl Source {
    fn built_in(name: &str, text: &str) -> Self {
        Self {
            name: format!("built-in {name}"),
            text: text.to_owned(),
        }
    }

    fn read(path: &Path) -> Result<Self, SpecError> {
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(Self { name, text }),
            Err(error) => Err(SpecError::whole(&name, format!("cannot be read: {error}"))),
        }
    }

    fn read_or(folder: Option<&Path>, name: &str, built_in: &str) -> Result<Self, SpecError> {
        match folder.map(|folder| folder.join(name)) {
            Some(path) if path.exists() => Self::read(&path),
            _ => Ok(Self::built_in(name, built_in)),
        }
    }
}

impl Configs {
    /// Reads a folder, or takes what is built in.
    ///
    /// # Errors
    /// The first file that is wrong, at its line.
    pub fn load(folder: Option<&Path>) -> Result<Self, SpecError> {
        if let Some(folder) = folder
            && !folder.is_dir()
        {
            let name = folder.display().to_string();
            return Err(SpecError::whole(&name, "is not a folder".to_owned()));
        }
        let source = Source::read_or(
            folder,
            "catalogue.yaml",
            include_str!("../../configs/catalogue.yaml"),
        )?;
        let catalogue = parse_catalogue(&source.name, &source.text)?;
        let source = Source::read_or(
            folder,
            "prices.yaml",
            include_str!("../../configs/prices.yaml"),
        )?;
        let prices = parse_prices(&source.name, &source.text)?;
        let mut pipelines: BTreeMap<PipelineName, Pipeline> = BTreeMap::new();
        for source in pipeline_sources(folder)? {
            let pipeline = parse_pipeline(&source.name, &source.text, &catalogue)?;
            let name = pipeline.name.clone();
            if pipelines.insert(name.clone(), pipeline).is_some() {
                let message = format!("pipeline {name} is defined in two files");
                return Err(SpecError::whole(&source.name, message));
            }
        }
        Ok(Self {
            catalogue: Arc::new(catalogue),
            pipelines: Arc::new(pipelines),
            prices,
        })
    }
}

fn pipeline_sources(folder: Option<&Path>) -> Result<Vec<Source>, SpecError> {
    let folder = folder.map(|folder| folder.join("pipelines"));
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        let built_in = [(
            "pipelines/live-video.yaml",
            include_str!("../../configs/pipelines/live-video.yaml"),
        )];
        return Ok(built_in
            .iter()
            .map(|(name, text)| Source::built_in(name, text))
            .collect());
    };
    let name = folder.display().to_string();
    let failed =
        |error: std::io::Error| SpecError::whole(&name, format!("cannot be read: {error}"));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| Source::read(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_in_loads() {
        let configs = Configs::load(None).unwrap();
        assert!(!configs.catalogue.0.is_empty());
        assert!(
            configs
                .pipelines
                .contains_key(&PipelineName::new("live-video").unwrap())
        );
    }

    #[test]
    fn a_folder_that_is_not_there_or_a_wrong_file_stops_the_start() {
        assert!(Configs::load(Some(Path::new("/nonexistent"))).is_err());
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(
            folder.path().join("prices.yaml"),
            "kind: Prices\nspec: {}\n",
        )
        .unwrap();
        let error = Configs::load(Some(folder.path())).unwrap_err().to_string();
        assert!(error.contains("prices.yaml"), "{error}");
    }
}
