//! The join token: `cj1.` and 91 characters that name an authority and prove that its fleet wants a node.
//!
//! | bytes | content |
//! |---|---|
//! | 32 | SHA-256 of the authority's public key |
//! | 8 | id, for lists and revoking |
//! | 24 | secret |
//! | 4 | checksum, so that a token copied in part is told from one that is not known |
//!
//! The coordinator stores only [`TokenHash`]. The text is shown once; nothing here prints it in logs.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use compass_shared::ids::Digest;
use rand::TryRngCore;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

const PREFIX: &str = "cj1.";
const AUTHORITY_BYTES: usize = 32;
const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 24;
const CHECKSUM_BYTES: usize = 4;
const TOKEN_BYTES: usize = AUTHORITY_BYTES + ID_BYTES + SECRET_BYTES + CHECKSUM_BYTES;

/// Why a text is not a token. Never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Something else altogether.
    #[error("not a join token: it must begin with {PREFIX:?}")]
    Prefix,
    /// Cut short, or with something added.
    #[error("the join token is damaged: was it copied whole?")]
    Damaged,
}

/// A token's id: names it in lists and when it is revoked; no secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId([u8; ID_BYTES]);

impl fmt::Display for TokenId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&hex::encode(self.0))
    }
}

/// What the coordinator stores of a token: SHA-256 over id and secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenHash(pub Digest);

impl fmt::Display for TokenHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, formatter)
    }
}

/// Id and secret as they travel to the coordinator.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Presented {
    id: [u8; ID_BYTES],
    secret: [u8; SECRET_BYTES],
}

impl Presented {
    pub(super) fn hash(&self) -> TokenHash {
        let mut both = Zeroizing::new([0_u8; ID_BYTES + SECRET_BYTES]);
        let (id, secret) = both.split_at_mut(ID_BYTES);
        id.copy_from_slice(&self.id);
        secret.copy_from_slice(&self.secret);
        TokenHash(Digest::of(&both[..]))
    }
}

impl Drop for Presented {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

impl fmt::Debug for Presented {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "token {}", TokenId(self.id))
    }
}

/// A join token with its secret.
#[derive(Clone)]
pub struct JoinToken {
    authority: Digest,
    presented: Presented,
}

impl JoinToken {
    /// Draws a new token for the fleet of an authority.
    pub fn mint(authority: Digest) -> Self {
        let mut id = [0; ID_BYTES];
        let mut secret = [0; SECRET_BYTES];
        for part in [&mut id[..], &mut secret[..]] {
            rand::rngs::OsRng
                .try_fill_bytes(part)
                .expect("the system gives entropy");
        }
        Self::from_parts(*authority.as_bytes(), id, secret)
    }

    pub(super) fn from_parts(
        authority: [u8; AUTHORITY_BYTES],
        id: [u8; ID_BYTES],
        secret: [u8; SECRET_BYTES],
    ) -> Self {
        Self {
            authority: Digest::from_bytes(authority),
            presented: Presented { id, secret },
        }
    }

    /// Reads a token; white space around it (a trailing newline of a file) does not count.
    ///
    /// # Errors
    /// When the text is not a whole token.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let encoded = text.trim().strip_prefix(PREFIX).ok_or(TokenError::Prefix)?;
        let bytes = Zeroizing::new(
            URL_SAFE_NO_PAD
                .decode(encoded)
                .map_err(|_| TokenError::Damaged)?,
        );
        if bytes.len() != TOKEN_BYTES {
            return Err(TokenError::Damaged);
        }
        let (content, checksum) = bytes.split_at(TOKEN_BYTES - CHECKSUM_BYTES);
        if checksum_of(content) != checksum {
            return Err(TokenError::Damaged);
        }
        let mut authority = [0; AUTHORITY_BYTES];
        let mut id = [0; ID_BYTES];
        let mut secret = [0; SECRET_BYTES];
        let (first, rest) = content.split_at(AUTHORITY_BYTES);
        let (second, third) = rest.split_at(ID_BYTES);
        authority.copy_from_slice(first);
        id.copy_from_slice(second);
        secret.copy_from_slice(third);
        Ok(Self::from_parts(authority, id, secret))
    }

    /// The text for the person who joins the node. To be shown once and never logged.
    pub fn reveal(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(TOKEN_BYTES));
        bytes.extend_from_slice(self.authority.as_bytes());
        bytes.extend_from_slice(&self.presented.id);
        bytes.extend_from_slice(&self.presented.secret);
        let checksum = checksum_of(&bytes);
        bytes.extend_from_slice(&checksum);
        Zeroizing::new(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(&*bytes)))
    }

    /// SHA-256 of the public key of the authority that the coordinator must belong to.
    pub fn authority(&self) -> Digest {
        self.authority
    }

    /// Its id.
    pub fn id(&self) -> TokenId {
        TokenId(self.presented.id)
    }

    /// What the coordinator stores.
    pub fn hash(&self) -> TokenHash {
        self.presented.hash()
    }

    pub(super) fn presented(&self) -> Presented {
        self.presented.clone()
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "JoinToken({}, secret hidden)", self.id())
    }
}

fn checksum_of(content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let digest = Digest::of(content);
    let [a, b, c, d, ..] = *digest.as_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> JoinToken {
        JoinToken::from_parts([7; 32], [1; 8], [2; 24])
    }

    #[test]
    fn tokens_read_back() {
        let token = JoinToken::mint(Digest::of(b"authority"));
        let text = token.reveal();
        let read = JoinToken::parse(&format!(" {}\n", *text)).unwrap();
        assert_eq!(read.authority(), token.authority());
        assert_eq!(read.hash(), token.hash());
        assert_eq!(read.id(), token.id());
        assert!(text.starts_with("cj1.") && text.len() == 4 + 91);
        assert_ne!(
            JoinToken::mint(token.authority()).hash(),
            token.hash(),
            "each is drawn anew"
        );
    }

    #[test]
    fn the_format_is_fixed() {
        assert_eq!(
            token().hash().to_string(),
            Digest::of(&[&[1_u8; 8][..], &[2; 24]].concat()).to_string()
        );
        assert!(token().reveal().starts_with("cj1.BwcHBwcHBwcHBwcHBwcH"));
        assert_eq!(token().id().to_string(), "0101010101010101");
    }

    #[test]
    fn nothing_printed_shows_the_secret() {
        let token = token();
        let secret = "02020202";
        for text in [
            format!("{token:?}"),
            format!("{:?}", token.presented()),
            TokenError::Damaged.to_string(),
        ] {
            assert!(!text.contains(secret) && !text.contains("AgIC"), "{text}");
        }
    }

    #[test]
    fn each_damage_is_noticed() {
        let text = token().reveal().clone();
        assert_eq!(JoinToken::parse("").unwrap_err(), TokenError::Prefix);
        assert_eq!(JoinToken::parse("cj2.abc").unwrap_err(), TokenError::Prefix);
        assert_eq!(
            JoinToken::parse(&text[..text.len() - 1]).unwrap_err(),
            TokenError::Damaged
        );
        assert_eq!(
            JoinToken::parse(&format!("{}A", *text)).unwrap_err(),
            TokenError::Damaged
        );
        let mut other = text.as_bytes().to_vec();
        other[40] = if other[40] == b'A' { b'B' } else { b'A' };
        assert_eq!(
            JoinToken::parse(&String::from_utf8(other).unwrap()).unwrap_err(),
            TokenError::Damaged
        );
    }

    proptest! {
        #[test]
        fn random_text_never_panics(text in "(cj1\\.)?.{0,120}") {
            let _ = JoinToken::parse(&text);
        }
    }
}
