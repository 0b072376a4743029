//! Names and numbers that identify things.
//!
//! A name is text as people write it (`no`, `on`, `1.10` and `012` are names, not booleans or numbers); the rules of [`check_name`] hold for all of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

/// The longest name, in bytes: it must fit one label of a certificate's host name.
pub const NAME_BYTES_MAX: usize = 63;

/// Why a text is not a valid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// Nothing was written.
    #[error("a name must not be empty")]
    Empty,
    /// Longer than [`NAME_BYTES_MAX`].
    #[error("a name has at most {NAME_BYTES_MAX} characters, this one has {0}")]
    TooLong(usize),
    /// A character outside the allowed set.
    #[error(
        "a name consists of letters, digits, '-', '_' and '.', and {name:?} contains {character:?}"
    )]
    Character {
        /// The offending name.
        name: String,
        /// The first character that is not allowed.
        character: char,
    },
}

/// Checks the rules common to all names.
pub fn check_name(text: &str) -> Result<(), InvalidName> {
    if text.is_empty() {
        return Err(InvalidName::Empty);
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(InvalidName::TooLong(text.len()));
    }
    match text
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')))
    {
        Some(character) => Err(InvalidName::Character {
            name: text.to_owned(),
            character,
        }),
        None => Ok(()),
    }
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub struct $name(String);

        impl $name {
            /// Takes a text as a name.
            ///
            /// # Errors
            /// When the text breaks the rules of [`check_name`].
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidName> {
                let text = text.into();
                check_name(&text)?;
                Ok(Self(text))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::new(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
            }
        }
    )*};
}

names! {
    /// A node of the fleet; comes from its certificate, never from a message.
    NodeId;
    /// A site: nodes that share an uplink.
    SiteId;
    /// A registered query.
    QueryId;
    /// A pipeline.
    PipelineName;
    /// An operator within a pipeline.
    OperatorId;
    /// An operator's name in the catalogue.
    OperatorKind;
    /// A knob of an operator.
    KnobName;
    /// An artifact's name in the catalogue (its content is named by [`Digest`]).
    ArtifactName;
}

/// A SHA-256 digest; names contents (artifacts, plans, configurations, public keys).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// Takes the raw 32 bytes of a digest computed elsewhere.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The raw bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first 12 hexadecimal digits, for people.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.short())
    }
}

impl FromStr for Digest {
    type Err = hex::FromHexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?
                .parse()
                .map_err(serde::de::Error::custom)
        } else {
            Ok(Self(<[u8; 32]>::deserialize(deserializer)?))
        }
    }
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl $name {
            /// The number after this one.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

numbers! {
    /// The version of a query's plan; grows by one with each new plan.
    Generation;
    /// A frame of one query, numbered by its app.
    FrameId;
    /// A profiling trial, numbered by the coordinator.
    TrialId;
    /// A set of frames captured for trials, numbered by the coordinator.
    SampleSetId;
}

/// An instance: one loaded operator on one node; the hash of artifact, configuration and node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u64);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:012x}", self.0 >> 16))
    }
}

/// Orders the assignment's changes over restarts, restores and elections.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Commit {
    /// Begins when a coordinator takes office; exceeds every term the agents report.
    pub term: u64,
    /// Number within the term.
    pub number: u64,
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.number)
    }
}
