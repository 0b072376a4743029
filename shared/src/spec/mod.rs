//! The files people write (Kubernetes-shaped YAML), read strictly: an unknown key, a duplicate key, a missing unit or an implausible value is
//! an error that points at its line and says the way out.
//!
//! Start at [`load`]. Document types are in [`documents`], written quantities in [`quantity`]. TOML settings of the daemons are read by
//! [`crate::settings`] with the same diagnostics.

mod diagnostic;
pub mod documents;
pub mod quantity;
mod suggest;

pub use diagnostic::SpecError;
pub use suggest::did_you_mean;

use serde::de::DeserializeOwned;

/// Most bytes of one YAML file or submitted spec: far above any real one, far below what could hurt.
pub const SPEC_BYTES_MAX: usize = 1 << 20;

/// Deepest nesting of one YAML file; real ones need six.
const DEPTH_MAX: usize = 32;

/// Reads one YAML document of a known type; `source` (a path, or `request`) appears in errors.
///
/// # Errors
/// Any deviation from the type, with the line it is on.
pub fn load<T: DeserializeOwned>(source: &str, text: &str) -> Result<T, SpecError> {
    if text.len() > SPEC_BYTES_MAX {
        return Err(SpecError::whole(
            source,
            format!(
                "{} bytes is too much, a spec has at most {SPEC_BYTES_MAX}",
                text.len()
            ),
        ));
    }
    let says_nothing = text.lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line == "---"
    });
    if says_nothing {
        return Err(SpecError::whole(
            source,
            "the file is empty or holds only comments".to_owned(),
        ));
    }
    serde_saphyr::from_str_with_options(text, options())
        .map_err(|error| SpecError::from_yaml(source, text, &error))
}

/// Strict reading: duplicate keys are errors in maps too, no YAML 1.1 booleans, no merge tricks, bounded aliases and depth.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: DEPTH_MAX,
            max_aliases: 100,
            max_nodes: 50_000,
            max_documents: 1,
        },
        duplicate_keys: serde_saphyr::options::DuplicateKeyPolicy::Error,
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        with_snippet: false,
    }
}

#[cfg(test)]
mod tests;
