//! What the golden configuration finds in a real video: the truth of a video that nobody has labelled.
//!
//! Start at [`truth_file`]. The operators are the ones that agents run, here without agents. The result is kept beside the fetched files
//! under a name that holds a digest of all it depends on.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use anyhow::Context;
use compass_agent::operators::InProcess;
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::pipeline::{Pipeline, PipelineConfiguration};
use sha2::{Digest, Sha256};

use super::footage;
use super::networks::Networks;
use super::view::View;

#[cfg(test)]
mod tests;

/// Part of the digest: grows when operators find something else under the same configuration.
const VERSION: u32 = 1;

/// What looks for the truth.
pub(crate) struct Golden<'a> {
    pub(crate) pipeline: &'a Pipeline,
    pub(crate) catalogue: &'a Catalogue,
    pub(crate) networks: &'a Networks,
    /// Pictures a second.
    pub(crate) rate_hz: f64,
}

/// A pipeline from its source to the operator whose output is judged, in this process.
pub(crate) struct Chain(Vec<InProcess>);

impl Chain {
    /// Loads the operators in this configuration.
    pub(crate) fn load(
        golden: &Golden<'_>,
        configuration: &PipelineConfiguration,
    ) -> anyhow::Result<Self> {
        let mut chain = Vec::new();
        for operator in &golden.pipeline.operators {
            let entry = golden.catalogue.0.get(&operator.kind);
            let entry = entry.with_context(|| format!("no operator {}", operator.kind))?;
            let own = configuration.0.get(&operator.id);
            let own = own.with_context(|| format!("{} has no configuration", operator.id))?;
            chain.push(golden.networks.load(entry, own)?);
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

/// The file in this folder with what the golden configuration finds in every picture of a video with this SHA-256; made now if it is not
/// there.
pub(crate) fn truth_file(
    golden: &Golden<'_>,
    folder: &Path,
    video_sha256: &str,
    pictures: impl FnOnce() -> anyhow::Result<Vec<Arc<[u8]>>>,
    view: &mut dyn View,
) -> anyhow::Result<PathBuf> {
    let Golden {
        pipeline,
        catalogue,
        rate_hz,
        ..
    } = *golden;
    let configuration = pipeline.golden();
    let kinds = pipeline.operators.iter().map(|operator| &operator.kind);
    let artifacts: Vec<_> = pipeline
        .operators
        .iter()
        .filter_map(|o| {
            catalogue
                .0
                .get(&o.kind)?
                .artifact(configuration.0.get(&o.id)?)
        })
        .map(|choice| choice.digest.to_string())
        .collect();
    let all = format!(
        "{VERSION} {video_sha256} {rate_hz} {} {configuration:?} {:?} {artifacts:?}",
        footage::FRAMES_MAX,
        kinds.collect::<Vec<_>>(),
    );
    let key = hex::encode(Sha256::digest(all.as_bytes()));
    let path = folder.join(format!("truth-{}.json", &key[..16]));
    if path.exists() {
        return Ok(path);
    }
    let load = || Chain::load(golden, &configuration);
    let found = watch(&pictures()?, &load, view)?;
    let found: Vec<serde_json::Value> = found
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<Result<_, _>>()?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&mut file, &found)?;
    file.persist(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// In how many pictures something was found, and how many there are.
pub(crate) fn seen(truth: &Path) -> anyhow::Result<(usize, usize)> {
    let text = std::fs::read(truth)?;
    let pictures: Vec<Vec<serde_json::Value>> = serde_json::from_slice(&text)
        .with_context(|| format!("{} is no list of labels", truth.display()))?;
    let seen = pictures.iter().filter(|boxes| !boxes.is_empty()).count();
    Ok((seen, pictures.len()))
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
