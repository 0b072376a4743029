//! The one place that knows how messages become bytes: bincode 2 with a limit, in length-delimited frames.
//!
//! Start at [`encode`] and [`decode`] for a message alone, at [`encode_frame`] and [`FrameHeader`] for a message on a
//! stream. No other module may name bincode, so that the codec can be replaced here; the codec id in every frame keeps
//! two codecs apart while that happens.
//!
//! A frame is seven bytes of header, then the body:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | length of the body in bytes, big endian |
//! | 1 | codec id |
//! | 2 | schema version of the body's message enum, big endian |
//!
//! What the codec demands of wire types: it is not self-describing, so no `#[serde(skip…)]`, `default`, `flatten`,
//! `tag` or `untagged`, no `serde_json::Value`, fields and variants only ever appended in a new version; and no
//! sequence of values that take no bytes (`Vec<()>`), whose length could not be bounded by the bytes received.
//!
//! Deliberately absent: reading from and writing to streams (the transport does that), and files on disk, which are
//! versioned JSON.

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest encoded message in bytes. Bulk payloads (frames, artifacts) travel as raw stream bytes, not as messages.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Codec id of bincode 2 with its standard configuration.
pub const CODEC_BINCODE_2: u8 = 1;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 7;

/// Part of the wire: changing it changes every message's bytes.
const CONFIGURATION: Configuration<LittleEndian, Varint, Limit<MESSAGE_BYTES_MAX>> =
    bincode::config::standard().with_limit::<MESSAGE_BYTES_MAX>();

/// Why a message could not be written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The type or value cannot be expressed; a fault of this build.
    #[error("message cannot be encoded: {reason}")]
    Encode {
        /// What the codec says.
        reason: String,
    },
    /// The bytes are not a message of the expected type.
    #[error("message cannot be read: {reason}")]
    Decode {
        /// What the codec says.
        reason: String,
    },
    /// More bytes than the message needs: another type or version was sent.
    #[error("message is followed by {extra} unexpected bytes")]
    Trailing {
        /// Bytes left over.
        extra: usize,
    },
    /// Larger than the limit in force.
    #[error("message of {bytes} bytes exceeds the limit of {limit}")]
    TooLarge {
        /// Size of the body.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A frame written with a codec this build does not know.
    #[error("frame uses codec {found}, this build reads codec {CODEC_BINCODE_2}")]
    UnknownCodec {
        /// Codec id received.
        found: u8,
    },
    /// A frame of another schema version than was negotiated.
    #[error("frame has schema version {found}, version {expected} was negotiated")]
    WrongSchema {
        /// Version received.
        found: u16,
        /// Version negotiated.
        expected: u16,
    },
    /// A frame cut short, or with bytes after its end.
    #[error("frame has {found} bytes, its header says {expected}")]
    FrameLength {
        /// Bytes present.
        found: usize,
        /// Bytes the header announces.
        expected: usize,
    },
}

/// Encodes one message.
///
/// # Errors
/// [`CodecError::TooLarge`] above [`MESSAGE_BYTES_MAX`]; [`CodecError::Encode`] for a type the codec cannot express.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::new();
    encode_into(message, &mut bytes)?;
    Ok(bytes)
}

/// Decodes one message from exactly `bytes`.
///
/// # Errors
/// On damaged, truncated or surplus bytes; never panics and never allocates more than a small multiple of the input.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(CodecError::TooLarge {
            bytes: bytes.len(),
            limit: MESSAGE_BYTES_MAX,
        });
    }
    let (message, consumed) =
        bincode::serde::decode_from_slice(bytes, CONFIGURATION).map_err(|error| {
            CodecError::Decode {
                reason: error.to_string(),
            }
        })?;
    match bytes.len() - consumed {
        0 => Ok(message),
        extra => Err(CodecError::Trailing { extra }),
    }
}

/// What stands before each body on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the body in bytes.
    pub body_bytes: u32,
    /// Which codec wrote the body.
    pub codec: u8,
    /// Which version of the message enum the body holds.
    pub schema: u16,
}

impl FrameHeader {
    /// Writes the seven bytes.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [l0, l1, l2, l3] = self.body_bytes.to_be_bytes();
        let [s0, s1] = self.schema.to_be_bytes();
        [l0, l1, l2, l3, self.codec, s0, s1]
    }

    /// Reads the seven bytes without judging them; see [`FrameHeader::check`].
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let [l0, l1, l2, l3, codec, s0, s1] = bytes;
        Self {
            body_bytes: u32::from_be_bytes([l0, l1, l2, l3]),
            codec,
            schema: u16::from_be_bytes([s0, s1]),
        }
    }

    /// Checks a received header before its body is read, and gives the body's length in bytes.
    ///
    /// `limit` is the largest body the reader wants here, at most [`MESSAGE_BYTES_MAX`].
    ///
    /// # Errors
    /// For an unknown codec, another schema version, or a body above the limit.
    pub fn check(self, schema: u16, limit: usize) -> Result<usize, CodecError> {
        if self.codec != CODEC_BINCODE_2 {
            return Err(CodecError::UnknownCodec { found: self.codec });
        }
        if self.schema != schema {
            return Err(CodecError::WrongSchema {
                found: self.schema,
                expected: schema,
            });
        }
        let limit = limit.min(MESSAGE_BYTES_MAX);
        let bytes = self.body_bytes as usize;
        if bytes > limit {
            return Err(CodecError::TooLarge { bytes, limit });
        }
        Ok(bytes)
    }
}

/// Encodes one message as a whole frame: header and body in one buffer.
///
/// # Errors
/// As [`encode`].
pub fn encode_frame<T: Serialize + ?Sized>(
    schema: u16,
    message: &T,
) -> Result<Vec<u8>, CodecError> {
    let mut bytes = vec![0; HEADER_BYTES];
    let body = encode_into(message, &mut bytes)?;
    let header = FrameHeader {
        body_bytes: u32::try_from(body).expect("encode_into bounds the body at 16 MiB"),
        codec: CODEC_BINCODE_2,
        schema,
    };
    bytes[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    Ok(bytes)
}

/// Decodes one message from exactly one whole frame.
///
/// # Errors
/// As [`FrameHeader::check`] and [`decode`], and for a frame whose length is not what its header says.
pub fn decode_frame<T: DeserializeOwned>(
    schema: u16,
    limit: usize,
    frame: &[u8],
) -> Result<T, CodecError> {
    let Some((header, body)) = frame.split_first_chunk::<HEADER_BYTES>() else {
        return Err(CodecError::FrameLength {
            found: frame.len(),
            expected: HEADER_BYTES,
        });
    };
    let body_bytes = FrameHeader::from_bytes(*header).check(schema, limit)?;
    if body.len() != body_bytes {
        return Err(CodecError::FrameLength {
            found: frame.len(),
            expected: HEADER_BYTES + body_bytes,
        });
    }
    decode(body)
}

/// Appends the encoded message and returns its length in bytes.
fn encode_into<T: Serialize + ?Sized>(
    message: &T,
    buffer: &mut Vec<u8>,
) -> Result<usize, CodecError> {
    let bytes =
        bincode::serde::encode_into_std_write(message, buffer, CONFIGURATION).map_err(|error| {
            CodecError::Encode {
                reason: error.to_string(),
            }
        })?;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(CodecError::TooLarge {
            bytes,
            limit: MESSAGE_BYTES_MAX,
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
