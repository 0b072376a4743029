//! The detector's path as the demo runs it: scene → resize → JPEG → network → detections → counts. Shared by the test of the
//! committed weights and the example `evaluate`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use compass_scenes::{CLASS_NAMES, Frame};
use compass_shared::vision::{
    CELL_PX, Counts, DecodeOptions, Detection, TrueObject, decode_center_head, match_f1, resize,
    standardise,
};
use image::RgbImage;
use image::codecs::jpeg::JpegEncoder;
use rten::{Model, RunOptions, ThreadPool};
use rten_tensor::prelude::*;
use rten_tensor::{NdTensor, NdTensorView};

/// Where the committed weights lie.
pub(crate) fn models_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

/// A network on one thread.
pub(crate) struct Network {
    model: Model,
    pool: Arc<ThreadPool>,
}

impl Network {
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let model =
            Model::load_file(path).with_context(|| format!("cannot load {}", path.display()))?;
        Ok(Self {
            model,
            pool: Arc::new(ThreadPool::with_num_threads(1)),
        })
    }

    /// The raw cells for a standardised picture: all planes, then rows and columns.
    pub(crate) fn cells(
        &self,
        planes: &[f32],
        width: usize,
        height: usize,
    ) -> Result<(Vec<f32>, usize, usize)> {
        let input = NdTensorView::from_data([1, 3, height, width], planes);
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&self.pool)));
        let output = self.model.run_one(input.into(), Some(options))?;
        let output: NdTensor<f32, 4> = output.try_into()?;
        let [_, _, rows, columns] = output.shape();
        Ok((output.to_vec(), rows, columns))
    }

    pub(crate) fn detect(
        &self,
        picture: &RgbImage,
        options: &DecodeOptions,
    ) -> Result<Vec<Detection>> {
        let (width, height) = (picture.width() as usize, picture.height() as usize);
        let planes = standardise(picture.as_raw(), width, height)?;
        let (cells, rows, columns) = self.cells(&planes, width, height)?;
        anyhow::ensure!(
            rows * CELL_PX == height && columns * CELL_PX == width,
            "sides must be multiples of {CELL_PX}"
        );
        Ok(decode_center_head(
            &cells,
            CLASS_NAMES.len(),
            rows,
            columns,
            options,
        )?)
    }
}

/// What the prepare operator does to a frame before it is sent on.
pub(crate) fn resized(frame: &Frame, width: u32, height: u32) -> Result<RgbImage> {
    let from = (frame.width as usize, frame.height as usize);
    let rgb = resize(&frame.rgb, from, (width as usize, height as usize))?;
    RgbImage::from_raw(width, height, rgb).context("a resized frame has width × height pixels")
}

/// The picture as the receiver of this JPEG sees it, and the JPEG's size in bytes.
pub(crate) fn through_jpeg(picture: &RgbImage, quality: u8) -> Result<(RgbImage, usize)> {
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, quality).encode_image(picture)?;
    let seen = image::load_from_memory(&bytes)?.into_rgb8();
    Ok((seen, bytes.len()))
}

pub(crate) fn counts(found: &[Detection], frame: &Frame) -> Counts {
    let truth: Vec<TrueObject> = frame
        .truth
        .iter()
        .map(|t| TrueObject {
            class: t.class,
            x: t.x,
            y: t.y,
            w: t.w,
            h: t.h,
        })
        .collect();
    match_f1(found, &truth, 0.5)
}
