//! What the golden configuration finds in a real video: the truth of a video that nobody has labelled.
//!
//! Start at [`truth_file`]. The operators are the ones that agents run, here without agents. The result is kept beside the fetched files
//! under a name that holds a digest of all it depends on.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use anyhow::Context;
use compass_agent::operators::InProcess;
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::pipeline::{Pipeline, PipelineConfiguration};
use sha2::{Digest, Sha256};

use super::footage;
use super::view::View;
use crate::fetch::Fetched;

#[cfg(test)]
mod tests;

/// Part of the digest: grows when operators find something else under the same configuration.
const VERSION: u32 = 1;

/// A pipeline from its source to the operator whose output is judged, in this process.
pub(crate) struct Chain(Vec<InProcess>);

impl Chain {
    /// Loads the operators in this configuration.
    pub(crate) fn load(
        pipeline: &Pipeline,
        catalogue: &Catalogue,
        configuration: &PipelineConfiguration,
        fetched: &Fetched,
    ) -> anyhow::Result<Self> {
        let mut chain = Vec::new();
        for operator in &pipeline.operators {
            let entry = catalogue.0.get(&operator.kind);
            let entry = entry.with_context(|| format!("no operator {}", operator.kind))?;
            let own = configuration.0.get(&operator.id);
            let own = own.with_context(|| format!("{} has no configuration", operator.id))?;
            let artifact = match entry.artifact(own) {
                Some(choice) => Some(fetched.model(&choice.digest.to_string())?),
                None => None,
            };
            let loaded = InProcess::new(&entry.runtime, own, artifact.as_deref());
            let loaded = loaded.map_err(anyhow::Error::msg);
            chain.push(loaded.with_context(|| format!("operator {}", operator.id))?);
            if entry.evaluator.is_some() {
                return Ok(Self(chain));
            }
        }
        anyhow::bail!("nothing in the pipeline is judged")
    }

    /// What comes out for a picture; `None` where a sampler leaves it out.
    pub(crate) fn run(&mut self, jpeg: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let mut passed = ("jpeg".to_owned(), jpeg.to_vec());
        for operator in &mut self.0 {
            let (content, bytes) = &passed;
            let out = operator.process(content, bytes);
            match out.map_err(anyhow::Error::msg)? {
                Some(out) => passed = out,
                None => return Ok(None),
            }
        }
        Ok(Some(passed.1))
    }
}

/// The file with what the golden configuration finds in every frame that is shown; made now if it is not there.
pub(crate) fn truth_file(
    fetched: &Fetched,
    pipeline: &Pipeline,
    catalogue: &Catalogue,
    rate_hz: f64,
    view: &mut dyn View,
) -> anyhow::Result<PathBuf> {
    let golden = pipeline.golden();
    let (video, video_sha256) = fetched.video();
    let kinds = pipeline.operators.iter().map(|operator| &operator.kind);
    let artifacts: Vec<_> = pipeline
        .operators
        .iter()
        .filter_map(|o| catalogue.0.get(&o.kind)?.artifact(golden.0.get(&o.id)?))
        .map(|choice| choice.digest.to_string())
        .collect();
    let all = format!(
        "{VERSION} {video_sha256} {rate_hz} {} {golden:?} {:?} {artifacts:?}",
        footage::FRAMES_MAX,
        kinds.collect::<Vec<_>>(),
    );
    let key = hex::encode(Sha256::digest(all.as_bytes()));
    let path = fetched.folder().join(format!("truth-{}.json", &key[..16]));
    if path.exists() {
        return Ok(path);
    }
    let pictures = footage::read(&video, rate_hz)?;
    let load = || Chain::load(pipeline, catalogue, &golden, fetched);
    let found = watch(&pictures, &load, view)?;
    let found: Vec<serde_json::Value> = found
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<Result<_, _>>()?;
    let mut file = tempfile::NamedTempFile::new_in(fetched.folder())?;
    serde_json::to_writer(&mut file, &found)?;
    file.persist(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Runs the pictures through chains on all cores.
fn watch(
    pictures: &[Arc<[u8]>],
    load: &(dyn Fn() -> anyhow::Result<Chain> + Sync),
    view: &mut dyn View,
) -> anyhow::Result<Vec<Vec<u8>>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (seen, results) = mpsc::channel();
    std::thread::scope(|scope| {
        let size = pictures.len().div_ceil(threads).max(1);
        for (number, part) in pictures.chunks(size).enumerate() {
            let seen = seen.clone();
            scope.spawn(move || {
                let work = || {
                    let mut chain = load()?;
                    for (index, picture) in part.iter().enumerate() {
                        let found = chain.run(picture)?.context("a frame was left out")?;
                        // Nobody listens any more after an error elsewhere.
                        let _unheard = seen.send(Ok((number * size + index, found)));
                    }
                    anyhow::Ok(())
                };
                if let Err(error) = work() {
                    let _unheard = seen.send(Err(error));
                }
            });
        }
        drop(seen);
        let mut all = vec![Vec::new(); pictures.len()];
        for (count, result) in results.iter().enumerate() {
            let (index, found) = result?;
            all[index] = found;
            view.step(&format!(
                "the largest network looks at the video for the truth, once: frame {} of {}",
                count + 1,
                pictures.len()
            ));
        }
        Ok(all)
    })
}
