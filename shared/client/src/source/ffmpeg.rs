//! Anything ffmpeg opens (files, cameras, RTSP, HTTP), decoded by a child process into motion JPEG on a pipe.
//!
//! No shell is in between, and a name is an argument whatever it begins with. The child gets a list of protocols, so that a play list cannot
//! make it do something else: a file reads files only, and an address never does.

use std::io::BufReader;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::{Mjpeg, Picture, Source, SourceError};

/// What addresses may begin with.
pub(super) const SCHEMES: [&str; 7] = ["rtsp", "http", "https", "srt", "rtp", "udp", "tcp"];
/// Protocols the child may use for a file.
const OF_FILES: &str = "file,crypto";
/// Protocols the child may use for an address.
const OF_ADDRESSES: &str = "crypto,rtsp,rtp,udp,tcp,http,https,tls,srt";

/// Whether an ffmpeg program can be started.
pub fn is_available() -> bool {
    Command::new("ffmpeg")
        .arg("-version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// A running ffmpeg child and its pictures.
#[derive(Debug)]
pub struct Ffmpeg {
    name: String,
    child: Child,
    pictures: Mjpeg<BufReader<ChildStdout>>,
}

impl Ffmpeg {
    /// Starts the child; `rate_hz` pictures per second come out, whatever the input's own rate is.
    ///
    /// # Errors
    /// When the child cannot be started.
    pub fn open(name: &str, rate_hz: f64) -> Result<Self, SourceError> {
        let read = |source| SourceError::Read {
            name: name.to_owned(),
            source,
        };
        let mut command = Command::new("ffmpeg");
        command.args(["-nostdin", "-loglevel", "error"]);
        if name.starts_with("/dev/video") {
            command.args(["-f", "v4l2", "-i", name]);
        } else if name.contains("://") && !Path::new(name).is_file() {
            command.args(["-protocol_whitelist", OF_ADDRESSES, "-i", name]);
        } else {
            // With the protocol in front, no part of the name is taken for one.
            let file = format!("file:{name}");
            command.args(["-protocol_whitelist", OF_FILES, "-i", &file]);
        }
        command.args([
            "-an",
            "-r",
            &rate_hz.to_string(),
            "-c:v",
            "mjpeg",
            "-q:v",
            "2",
            "-f",
            "mjpeg",
            "-",
        ]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(read)?;
        let stdout = child.stdout.take().expect("standard output was asked for");
        Ok(Self {
            name: name.to_owned(),
            child,
            pictures: Mjpeg::new(name, BufReader::new(stdout), rate_hz),
        })
    }
}

impl Source for Ffmpeg {
    fn next_picture(&mut self) -> Result<Option<Picture>, SourceError> {
        if let Some(picture) = self.pictures.next_picture()? {
            return Ok(Some(picture));
        }
        let status = self.child.wait().map_err(|source| SourceError::Read {
            name: self.name.clone(),
            source,
        })?;
        if status.success() {
            return Ok(None);
        }
        Err(SourceError::Unsupported {
            name: self.name.clone(),
            what: format!("ffmpeg ended with {status}; its words are above"),
        })
    }

    fn describe(&self) -> String {
        format!("{} (through ffmpeg)", self.name)
    }
}

impl Drop for Ffmpeg {
    fn drop(&mut self) {
        // The child may have ended by itself; either way it must not stay as a zombie.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
