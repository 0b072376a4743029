//! The hello: the first bytes each side sends on a new connection, before any versioned message.
//!
//! Start at [`Hello::encode`] and [`Hello::decode`]. The layout is laid by hand and frozen for ever, because every
//! later version of Compass must be able to read it, and to be refused by it, whatever happened to the codec:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | magic `CMPS` |
//! | 2 | lowest protocol version spoken, big endian |
//! | 2 | highest protocol version spoken, big endian |
//! | 1 | length of the build text in bytes |
//! | n | build text, UTF-8 without control characters, for people and logs only |
//!
//! Deliberately absent: no capabilities and no identity. What a peer can do follows from the negotiated version, who it
//! is follows from its certificate.

use std::fmt;
use std::ops::RangeInclusive;

/// The first four bytes of every hello.
pub const MAGIC: [u8; 4] = *b"CMPS";

/// Bytes before the build text: magic, two versions, one length.
pub const HEAD_BYTES: usize = 9;

/// Longest build text accepted and sent; bounds what an unknown peer can make us hold and log.
pub const BUILD_BYTES_MAX: usize = 120;

/// The versions of the message enums that this build speaks.
pub const SUPPORTED: RangeInclusive<u16> = 1..=1;

/// What one side says about itself before anything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Lowest protocol version spoken; at least 1.
    pub lowest: u16,
    /// Highest protocol version spoken; at least `lowest`.
    pub highest: u16,
    /// Which build this is, for people; never decided upon.
    pub build: String,
}

/// Why a hello could not be written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The peer speaks something else, or the bytes are damaged.
    #[error("not a Compass hello: starts with {}, expected {}", hex::encode(.found), hex::encode(MAGIC))]
    Magic {
        /// The first four bytes received.
        found: [u8; 4],
    },
    /// Fewer or more bytes than the layout says.
    #[error("hello has {found} bytes, its layout needs {expected}")]
    Length {
        /// Bytes received.
        found: usize,
        /// Bytes the layout needs.
        expected: usize,
    },
    /// The version range is empty or starts at zero.
    #[error("hello has the impossible version range {lowest} to {highest}")]
    Range {
        /// Lowest version stated.
        lowest: u16,
        /// Highest version stated.
        highest: u16,
    },
    /// The build text is longer than [`BUILD_BYTES_MAX`].
    #[error("build text has {bytes} bytes, the limit is {BUILD_BYTES_MAX}")]
    BuildTooLong {
        /// Length stated.
        bytes: usize,
    },
    /// The build text is not UTF-8 or carries control characters.
    #[error("build text is not printable UTF-8")]
    BuildText,
}

/// Two peers whose version ranges do not meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no common protocol version: {ours} and {theirs}")]
pub struct NoCommonVersion {
    /// What this side said.
    pub ours: Hello,
    /// What the peer said.
    pub theirs: Hello,
}

impl fmt::Display for Hello {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            lowest,
            highest,
            build,
        } = self;
        if lowest == highest {
            write!(formatter, "version {lowest} (build {build})")
        } else {
            write!(formatter, "versions {lowest} to {highest} (build {build})")
        }
    }
}

impl Hello {
    /// The hello of this build: every supported version, and `build` cut to what fits.
    pub fn ours(build: &str) -> Self {
        let mut text: String = build.chars().filter(|c| !c.is_control()).collect();
        while text.len() > BUILD_BYTES_MAX {
            text.pop();
        }
        Self {
            lowest: *SUPPORTED.start(),
            highest: *SUPPORTED.end(),
            build: text,
        }
    }

    /// Writes the frozen layout.
    ///
    /// # Errors
    /// When the range is impossible or the build text breaks its rules; [`Hello::ours`] never does.
    pub fn encode(&self) -> Result<Vec<u8>, HelloError> {
        check_range(self.lowest, self.highest)?;
        let length = u8::try_from(self.build.len())
            .ok()
            .filter(|length| usize::from(*length) <= BUILD_BYTES_MAX)
            .ok_or(HelloError::BuildTooLong {
                bytes: self.build.len(),
            })?;
        check_text(&self.build)?;
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.build.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.lowest.to_be_bytes());
        bytes.extend_from_slice(&self.highest.to_be_bytes());
        bytes.push(length);
        bytes.extend_from_slice(self.build.as_bytes());
        Ok(bytes)
    }

    /// Reads one hello from exactly `bytes`.
    ///
    /// # Errors
    /// When the bytes are not a hello; the message is fit to be sent back to the peer.
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        let Some((head, text)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
            return Err(HelloError::Length {
                found: bytes.len(),
                expected: HEAD_BYTES,
            });
        };
        let text_bytes = Self::text_bytes(head)?;
        if text.len() != text_bytes {
            return Err(HelloError::Length {
                found: bytes.len(),
                expected: HEAD_BYTES + text_bytes,
            });
        }
        let build = std::str::from_utf8(text).map_err(|_| HelloError::BuildText)?;
        check_text(build)?;
        let (lowest, highest) = range_of(head);
        Ok(Self {
            lowest,
            highest,
            build: build.to_owned(),
        })
    }

    /// Checks the head of a hello that arrives on a stream and says how many bytes of build text follow it.
    ///
    /// # Errors
    /// When the head is already wrong: the caller reads no further.
    pub fn text_bytes(head: &[u8; HEAD_BYTES]) -> Result<usize, HelloError> {
        let [m0, m1, m2, m3, .., length] = *head;
        let found = [m0, m1, m2, m3];
        if found != MAGIC {
            return Err(HelloError::Magic { found });
        }
        let (lowest, highest) = range_of(head);
        check_range(lowest, highest)?;
        let bytes = usize::from(length);
        if bytes > BUILD_BYTES_MAX {
            return Err(HelloError::BuildTooLong { bytes });
        }
        Ok(bytes)
    }

    /// The highest version both sides speak.
    ///
    /// # Errors
    /// [`NoCommonVersion`], which names both ranges and builds.
    pub fn negotiate(&self, theirs: &Self) -> Result<u16, NoCommonVersion> {
        let highest = self.highest.min(theirs.highest);
        if highest < self.lowest.max(theirs.lowest) {
            return Err(NoCommonVersion {
                ours: self.clone(),
                theirs: theirs.clone(),
            });
        }
        Ok(highest)
    }
}

fn range_of(head: &[u8; HEAD_BYTES]) -> (u16, u16) {
    let [_, _, _, _, l0, l1, h0, h1, _] = *head;
    (u16::from_be_bytes([l0, l1]), u16::from_be_bytes([h0, h1]))
}

fn check_range(lowest: u16, highest: u16) -> Result<(), HelloError> {
    if lowest == 0 || lowest > highest {
        return Err(HelloError::Range { lowest, highest });
    }
    Ok(())
}

fn check_text(build: &str) -> Result<(), HelloError> {
    if build.chars().any(char::is_control) {
        return Err(HelloError::BuildText);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(lowest: u16, highest: u16, build: &str) -> Hello {
        Hello {
            lowest,
            highest,
            build: build.to_owned(),
        }
    }

    #[test]
    fn golden_bytes_are_frozen() {
        let bytes = hello(1, 258, "compass 0.1.0").encode().unwrap();
        assert_eq!(
            hex::encode(&bytes),
            "434d5053000101020d636f6d7061737320302e312e30"
        );
        assert_eq!(
            Hello::decode(&bytes).unwrap(),
            hello(1, 258, "compass 0.1.0")
        );
    }

    #[test]
    fn ours_always_encodes() {
        let long = "é".repeat(500) + "\u{1b}[31m\n";
        let ours = Hello::ours(&long);
        assert_eq!(ours.build.len(), BUILD_BYTES_MAX);
        assert_eq!(Hello::decode(&ours.encode().unwrap()).unwrap(), ours);
        assert!(!Hello::ours("\u{1b}[31m\n").build.contains('\u{1b}'));
    }

    #[test]
    fn each_damage_has_its_own_error() {
        let good = hello(1, 2, "b").encode().unwrap();
        let with = |index: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[index] = value;
            Hello::decode(&bytes).unwrap_err()
        };
        assert!(matches!(with(0, b'G'), HelloError::Magic { .. }));
        assert_eq!(
            with(5, 0),
            HelloError::Range {
                lowest: 0,
                highest: 2
            }
        );
        assert_eq!(
            with(5, 3),
            HelloError::Range {
                lowest: 3,
                highest: 2
            }
        );
        assert_eq!(with(8, 255), HelloError::BuildTooLong { bytes: 255 });
        assert_eq!(
            with(8, 2),
            HelloError::Length {
                found: 10,
                expected: 11
            }
        );
        assert_eq!(with(9, 0xff), HelloError::BuildText);
        assert_eq!(with(9, 0x07), HelloError::BuildText);
        assert_eq!(
            Hello::decode(b"CM").unwrap_err(),
            HelloError::Length {
                found: 2,
                expected: HEAD_BYTES
            }
        );
        assert!(
            with(0, b'G').to_string().contains("474d5053"),
            "the message shows what came"
        );
    }

    #[test]
    fn unsendable_hellos_are_refused_before_sending() {
        assert!(hello(2, 1, "").encode().is_err());
        assert!(
            hello(1, 1, &"x".repeat(BUILD_BYTES_MAX + 1))
                .encode()
                .is_err()
        );
        assert!(hello(1, 1, &"x".repeat(300)).encode().is_err());
        assert!(hello(1, 1, "a\nb").encode().is_err());
    }

    #[test]
    fn the_highest_common_version_is_chosen() {
        let cases = [
            ((1, 1), (1, 1), Some(1)),
            ((1, 3), (2, 5), Some(3)),
            ((2, 5), (1, 3), Some(3)),
            ((4, 5), (1, 3), None),
            ((1, 1), (2, 2), None),
        ];
        for ((a, b), (c, d), expected) in cases {
            let result = hello(a, b, "us").negotiate(&hello(c, d, "them"));
            assert_eq!(result.ok(), expected, "{a}..{b} with {c}..{d}");
        }
        let refusal = hello(4, 5, "us")
            .negotiate(&hello(1, 1, "them"))
            .unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "no common protocol version: versions 4 to 5 (build us) and version 1 (build them)"
        );
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Hello::decode(&bytes);
        }

        #[test]
        fn truncation_is_an_error(cut in 0_usize..22) {
            let bytes = hello(1, 258, "compass 0.1.0").encode().unwrap();
            prop_assert!(Hello::decode(&bytes[..cut]).is_err());
        }
    }
}
