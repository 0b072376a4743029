//! YUV4MPEG2: raw planar video with a text header, as `ffmpeg -i in.mp4 out.y4m` writes it.

use std::io::{BufRead, Read};
use std::time::Duration;

use super::{Picture, SIDE_PX_MAX, Source, SourceError};

/// Longest header line accepted.
const LINE_BYTES_MAX: u64 = 1024;

/// How chroma is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chroma {
    /// Half width, half height.
    C420,
    /// Half width.
    C422,
    /// Full size.
    C444,
    /// None.
    Mono,
}

/// A Y4M stream.
#[derive(Debug)]
pub struct Y4m<R> {
    name: String,
    reader: R,
    width: u32,
    height: u32,
    chroma: Chroma,
    frame_every: Duration,
    frame: u64,
    offset: u64,
}

impl<R: BufRead> Y4m<R> {
    /// Reads the stream's header.
    ///
    /// # Errors
    /// When it is not a Y4M stream or uses a variant that is not supported.
    pub fn new(name: &str, mut reader: R) -> Result<Self, SourceError> {
        let unsupported = |what: String| SourceError::Unsupported {
            name: name.to_owned(),
            what,
        };
        let line = read_line(name, &mut reader)?;
        let mut words = line.split(' ');
        if words.next() != Some("YUV4MPEG2") {
            return Err(unsupported(
                "it does not begin with YUV4MPEG2, so it is no Y4M file".to_owned(),
            ));
        }
        let (mut width, mut height, mut chroma, mut rate) = (0, 0, Chroma::C420, (25, 1));
        for word in words {
            let Some((key, value)) = word.split_at_checked(1) else {
                continue;
            };
            let side = || {
                value
                    .parse::<u32>()
                    .ok()
                    .filter(|s| (1..=SIDE_PX_MAX).contains(s))
            };
            match key {
                "W" => {
                    width = side().ok_or_else(|| {
                        unsupported(format!(
                            "width {value:?} is not between 1 and {SIDE_PX_MAX}"
                        ))
                    })?
                }
                "H" => {
                    height = side().ok_or_else(|| {
                        unsupported(format!(
                            "height {value:?} is not between 1 and {SIDE_PX_MAX}"
                        ))
                    })?
                }
                "C" => {
                    chroma = match value {
                        "420" | "420jpeg" | "420mpeg2" | "420paldv" => Chroma::C420,
                        "422" => Chroma::C422,
                        "444" => Chroma::C444,
                        "mono" => Chroma::Mono,
                        other => {
                            return Err(unsupported(format!(
                                "chroma format {other:?}: convert it with -pix_fmt yuv420p"
                            )));
                        }
                    }
                }
                // The rate is a hint; one outside a sane range is ignored.
                "F" => {
                    let parsed = value
                        .split_once(':')
                        .and_then(|(n, d)| Some((n.parse::<u32>().ok()?, d.parse::<u32>().ok()?)));
                    rate = parsed
                        .filter(|(n, d)| *n > 0 && *d > 0 && n / d <= 1000)
                        .unwrap_or(rate);
                }
                _ => {}
            }
        }
        if width == 0 || height == 0 {
            return Err(unsupported(
                "its header has no width or no height".to_owned(),
            ));
        }
        let frame_every = Duration::from_secs_f64(f64::from(rate.1) / f64::from(rate.0));
        let offset = line.len() as u64 + 1;
        Ok(Self {
            name: name.to_owned(),
            reader,
            width,
            height,
            chroma,
            frame_every,
            frame: 0,
            offset,
        })
    }

    fn planes_bytes(&self) -> usize {
        let (w, h) = (self.width as usize, self.height as usize);
        let chroma = match self.chroma {
            Chroma::C420 => w.div_ceil(2) * h.div_ceil(2),
            Chroma::C422 => w.div_ceil(2) * h,
            Chroma::C444 => w * h,
            Chroma::Mono => 0,
        };
        w * h + 2 * chroma
    }

    fn broken(&self, what: impl Into<String>) -> SourceError {
        SourceError::Broken {
            name: self.name.clone(),
            frame: self.frame,
            offset: self.offset,
            what: what.into(),
        }
    }

    /// BT.601, limited range, as the format's readers assume when nothing else is stated.
    fn to_rgb(&self, planes: &[u8]) -> Vec<u8> {
        let (w, h) = (self.width as usize, self.height as usize);
        let (chroma_w, chroma_h) = match self.chroma {
            Chroma::C420 => (w.div_ceil(2), h.div_ceil(2)),
            Chroma::C422 => (w.div_ceil(2), h),
            Chroma::C444 | Chroma::Mono => (w, h),
        };
        let (luma, rest) = planes.split_at(w * h);
        let (blue, red) = rest.split_at(rest.len() / 2);
        let mut rgb = Vec::with_capacity(w * h * 3);
        for row in 0..h {
            for column in 0..w {
                let y = 1.164 * (f32::from(luma[row * w + column]) - 16.0);
                let at = (row * chroma_h / h) * chroma_w + column * chroma_w / w;
                let (u, v) = match self.chroma {
                    Chroma::Mono => (0.0, 0.0),
                    _ => (f32::from(blue[at]) - 128.0, f32::from(red[at]) - 128.0),
                };
                // `as u8` saturates.
                rgb.extend([
                    (y + 1.596 * v) as u8,
                    (y - 0.392 * u - 0.813 * v) as u8,
                    (y + 2.017 * u) as u8,
                ]);
            }
        }
        rgb
    }
}

fn read_line(name: &str, reader: &mut impl BufRead) -> Result<String, SourceError> {
    let mut line = Vec::new();
    let read = reader
        .by_ref()
        .take(LINE_BYTES_MAX)
        .read_until(b'\n', &mut line);
    read.map_err(|source| SourceError::Read {
        name: name.to_owned(),
        source,
    })?;
    if line.pop_if(|last| *last == b'\n').is_none() && !line.is_empty() {
        return Err(SourceError::Unsupported {
            name: name.to_owned(),
            what: "a header line does not end".to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}

impl<R: BufRead + Send> Source for Y4m<R> {
    fn next_picture(&mut self) -> Result<Option<Picture>, SourceError> {
        let at_end = self
            .reader
            .fill_buf()
            .map_err(|source| SourceError::Read {
                name: self.name.clone(),
                source,
            })?
            .is_empty();
        if at_end {
            return Ok(None);
        }
        let line = read_line(&self.name, &mut self.reader)?;
        if line.split(' ').next() != Some("FRAME") {
            return Err(self.broken("a frame must begin with FRAME"));
        }
        let mut planes = vec![0; self.planes_bytes()];
        if let Err(error) = self.reader.read_exact(&mut planes) {
            return Err(match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    self.broken("the file ends within this frame (truncated)")
                }
                _ => SourceError::Read {
                    name: self.name.clone(),
                    source: error,
                },
            });
        }
        let at = self.frame_every.mul_f64(self.frame as f64);
        let picture = Picture::rgb(self.width, self.height, self.to_rgb(&planes), at);
        self.offset += line.len() as u64 + 1 + planes.len() as u64;
        self.frame += 1;
        Ok(Some(picture))
    }

    fn describe(&self) -> String {
        format!(
            "{} ({}x{}, {:.1} frames/s)",
            self.name,
            self.width,
            self.height,
            1.0 / self.frame_every.as_secs_f64()
        )
    }
}
