//! Settings of the daemons and the command line: TOML, strict, with the diagnostics of [`crate::spec`].

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::spec::SpecError;

/// Reads settings from a text; `source` (a path) appears in errors.
///
/// # Errors
/// Any deviation from the type, with the line it is on.
pub fn parse<T: DeserializeOwned>(source: &str, text: &str) -> Result<T, SpecError> {
    toml::from_str(text).map_err(|error| SpecError::from_toml(source, text, &error))
}

/// Reads a settings file.
///
/// # Errors
/// A file that cannot be read, or any deviation from the type.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T, SpecError> {
    let source = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| SpecError::whole(&source, format!("cannot be read: {error}")))?;
    parse(&source, &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only reading is tested")]
    struct Example {
        keep_alive: String,
        idle: Option<String>,
    }

    #[test]
    fn field_098_a_mistyped_setting_is_an_error_with_its_line() {
        let error =
            parse::<Example>("agent.toml", "idle = \"30s\"\nkeep-alive = \"10s\"\n").unwrap_err();
        assert_eq!(error.place, Some((2, 1)));
        assert_eq!(error.message, "unknown key \"keep-alive\"");
        assert_eq!(error.hint.as_deref(), Some("did you mean \"keep_alive\"?"));
    }
}
