//! Motion JPEG: JPEG pictures one after another; they are sent on as they are.

use std::io::BufRead;
use std::time::Duration;

use super::{Picture, Source, SourceError};

/// Largest picture accepted; a real one of 4K size is under 4 MB.
const PICTURE_BYTES_MAX: usize = 16 << 20;

/// A stream of JPEG pictures.
#[derive(Debug)]
pub struct Mjpeg<R> {
    name: String,
    reader: R,
    frame_every: Duration,
    frame: u64,
    offset: u64,
}

impl<R: BufRead> Mjpeg<R> {
    /// Takes a stream whose pictures follow each other at `rate_hz`.
    pub fn new(name: &str, reader: R, rate_hz: f64) -> Self {
        Self {
            name: name.to_owned(),
            reader,
            frame_every: Duration::from_secs_f64(1.0 / rate_hz.max(1e-3)),
            frame: 0,
            offset: 0,
        }
    }

    fn broken(&self, what: impl Into<String>) -> SourceError {
        SourceError::Broken {
            name: self.name.clone(),
            frame: self.frame,
            offset: self.offset,
            what: what.into(),
        }
    }

    /// Reads up to and including the next end-of-image marker.
    ///
    /// Entropy-coded data stuffs every 0xFF, so FF D9 cannot appear in it; embedded thumbnails live in application segments, which are
    /// skipped by their length.
    fn read_picture(&mut self) -> Result<Option<Vec<u8>>, SourceError> {
        let mut bytes = Vec::new();
        let Some(first) = self.byte()? else {
            return Ok(None);
        };
        let second = self.byte()?;
        if (first, second) != (0xFF, Some(0xD8)) {
            return Err(self.broken("a picture must begin with the bytes FF D8"));
        }
        bytes.extend([0xFF, 0xD8]);
        let mut in_scan = false;
        loop {
            let byte = self
                .byte()?
                .ok_or_else(|| self.broken("the file ends within this picture (truncated)"))?;
            bytes.push(byte);
            if bytes.len() > PICTURE_BYTES_MAX {
                return Err(self.broken(format!(
                    "the picture is larger than {PICTURE_BYTES_MAX} bytes"
                )));
            }
            if byte != 0xFF {
                if !in_scan {
                    return Err(self.broken("a marker was expected"));
                }
                continue;
            }
            // Fill bytes before a marker carry nothing.
            let mut marker = 0xFF;
            while marker == 0xFF {
                marker = self
                    .byte()?
                    .ok_or_else(|| self.broken("the file ends within this picture (truncated)"))?;
            }
            bytes.push(marker);
            match marker {
                0xD9 => return Ok(Some(bytes)),
                0x00 | 0xD0..=0xD7 | 0x01 => {}
                _ => {
                    self.copy_segment(&mut bytes)?;
                    in_scan = marker == 0xDA;
                }
            }
        }
    }

    fn copy_segment(&mut self, bytes: &mut Vec<u8>) -> Result<(), SourceError> {
        let mut length = [0; 2];
        for slot in &mut length {
            *slot = self
                .byte()?
                .ok_or_else(|| self.broken("the file ends within a segment (truncated)"))?;
        }
        bytes.extend(length);
        let rest = usize::from(u16::from_be_bytes(length))
            .checked_sub(2)
            .ok_or_else(|| self.broken("a segment has no length"))?;
        for _ in 0..rest {
            let byte = self
                .byte()?
                .ok_or_else(|| self.broken("the file ends within a segment (truncated)"))?;
            bytes.push(byte);
        }
        Ok(())
    }

    fn byte(&mut self) -> Result<Option<u8>, SourceError> {
        let buffer = self.reader.fill_buf().map_err(|source| SourceError::Read {
            name: self.name.clone(),
            source,
        })?;
        let byte = buffer.first().copied();
        if byte.is_some() {
            self.reader.consume(1);
            self.offset += 1;
        }
        Ok(byte)
    }
}

impl<R: BufRead + Send> Source for Mjpeg<R> {
    fn next_picture(&mut self) -> Result<Option<Picture>, SourceError> {
        let at = self.frame_every.mul_f64(self.frame as f64);
        let picture = self.read_picture()?.map(|bytes| Picture {
            content: "jpeg".to_owned(),
            bytes,
            at,
        });
        self.frame += u64::from(picture.is_some());
        Ok(picture)
    }

    fn describe(&self) -> String {
        format!(
            "{} (motion JPEG, {:.1} frames/s)",
            self.name,
            1.0 / self.frame_every.as_secs_f64()
        )
    }
}
