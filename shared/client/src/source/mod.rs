//! Where an app's frames come from: Y4M and MJPEG files, folders of images, and whatever an ffmpeg child can open.
//!
//! Start at [`open`]. A source yields frames in order with their capture times and says exactly where it broke; frames before the break are good.

mod ffmpeg;
mod folder;
mod mjpeg;
mod y4m;

use std::path::Path;
use std::time::Duration;

pub use ffmpeg::{Ffmpeg, is_available as ffmpeg_is_available};
pub use folder::ImageFolder;
pub use mjpeg::Mjpeg;
pub use y4m::Y4m;

/// Widest and highest picture accepted, in pixels: four times 4K, far below what would exhaust memory.
pub const SIDE_PX_MAX: u32 = 16_384;

/// One picture, as sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// `jpeg`, or `rgb8 WIDTHxHEIGHT` for raw rows of red, green and blue bytes.
    pub content: String,
    /// The picture.
    pub bytes: Vec<u8>,
    /// When it was captured, from the start of the source.
    pub at: Duration,
}

impl Picture {
    /// A raw picture of `width`×`height` pixels.
    pub fn rgb(width: u32, height: u32, bytes: Vec<u8>, at: Duration) -> Self {
        Self {
            content: format!("rgb8 {width}x{height}"),
            bytes,
            at,
        }
    }
}

/// Why a source gives no (more) frames.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It could not be opened or read.
    #[error("cannot read {name}")]
    Read {
        /// The file or address.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Its bytes are not what they should be.
    #[error("{name}: frame {frame} at byte {offset}: {what}")]
    Broken {
        /// The file or address.
        name: String,
        /// Number of the frame, from 0.
        frame: u64,
        /// Where in the file.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// Nothing here can open it.
    #[error("{name}: {what}")]
    Unsupported {
        /// The file or address.
        name: String,
        /// Why, and the way out.
        what: String,
    },
}

/// A stream of pictures.
pub trait Source: Send {
    /// The next picture; `None` at the end.
    ///
    /// # Errors
    /// Where and how the source broke; it yields nothing after that.
    fn next_picture(&mut self) -> Result<Option<Picture>, SourceError>;

    /// What it is, for people.
    fn describe(&self) -> String;
}

/// Opens a file, folder, device or URL. `rate` is used where the source does not carry one.
///
/// # Errors
/// When nothing can open it; the message says what would.
pub fn open(name: &str, rate_hz: f64) -> Result<Box<dyn Source>, SourceError> {
    let path = Path::new(name);
    let read = |source| SourceError::Read {
        name: name.to_owned(),
        source,
    };
    if path.is_dir() {
        return Ok(Box::new(ImageFolder::open(path, rate_hz)?));
    }
    let is_file = path.is_file();
    if let Some((scheme, _)) = name.split_once("://")
        && !is_file
        && !ffmpeg::SCHEMES.contains(&scheme)
    {
        return Err(SourceError::Unsupported {
            name: name.to_owned(),
            what: format!(
                "addresses begin with one of {}, not with {scheme}",
                ffmpeg::SCHEMES.join(", ")
            ),
        });
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("y4m") if is_file => Ok(Box::new(Y4m::new(name, std::io::BufReader::new(std::fs::File::open(path).map_err(read)?))?)),
        Some("mjpeg" | "mjpg") if is_file => {
            Ok(Box::new(Mjpeg::new(name, std::io::BufReader::new(std::fs::File::open(path).map_err(read)?), rate_hz)))
        }
        _ if !is_file && !name.contains("://") && !name.starts_with("/dev/") => {
            Err(read(std::io::Error::new(std::io::ErrorKind::NotFound, "no such file or folder")))
        }
        _ if ffmpeg_is_available() => Ok(Box::new(Ffmpeg::open(name, rate_hz)?)),
        _ => Err(SourceError::Unsupported {
            name: name.to_owned(),
            what: "only .y4m, .mjpeg and folders of .jpg or .png open without ffmpeg; install ffmpeg or convert it first".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests;
