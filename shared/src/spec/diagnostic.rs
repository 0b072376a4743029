//! Errors that point at the line.

use std::fmt;

use serde_saphyr::Error as YamlError;

use super::suggest::did_you_mean;

/// What is wrong with a file, where, and the way out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecError {
    /// The file, or `request`.
    pub source: String,
    /// Line and column, from 1; `None` when it concerns the whole file.
    pub place: Option<(u64, u64)>,
    /// What is wrong.
    pub message: String,
    /// The way out.
    pub hint: Option<String>,
    /// The line itself.
    pub line_text: Option<String>,
}

impl std::error::Error for SpecError {}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source)?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, " ({hint})")?;
        }
        if let (Some(text), Some((line, column))) = (&self.line_text, self.place) {
            let number = line.to_string();
            let indent = " ".repeat((column as usize).saturating_sub(1));
            write!(
                f,
                "\n  {number} | {text}\n  {} | {indent}^",
                " ".repeat(number.len())
            )?;
        }
        Ok(())
    }
}

impl SpecError {
    /// An error that concerns the whole file.
    pub fn whole(source: &str, message: String) -> Self {
        Self {
            source: source.to_owned(),
            place: None,
            message,
            hint: None,
            line_text: None,
        }
    }

    /// An error at a place of a text.
    pub fn at(source: &str, text: &str, (line, column): (u64, u64), message: String) -> Self {
        Self {
            place: Some((line, column)),
            line_text: line_of(text, line),
            ..Self::whole(source, message)
        }
    }

    /// The same error with a way out.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn from_yaml(source: &str, text: &str, error: &YamlError) -> Self {
        let error = error.without_snippet();
        let mut found = match error.location() {
            Some(at) if at.line() > 0 => {
                Self::at(source, text, (at.line(), at.column()), String::new())
            }
            _ => Self::whole(source, String::new()),
        };
        match error {
            YamlError::SerdeUnknownField {
                field, expected, ..
            } => {
                found.message = format!("unknown key {field:?}");
                found.hint = Some(unknown_hint(field, expected.iter().copied()));
            }
            YamlError::DuplicateMappingKey { key, .. } => {
                let key = key.as_deref().unwrap_or("?");
                found.message = format!("key {key:?} is written twice in one mapping");
                found.hint = match (found.place, first_line_with_key(text, key)) {
                    (Some((line, _)), Some(first)) if first < line => {
                        Some(format!("first on line {first}; keep one of them"))
                    }
                    _ => Some("keep one of them".to_owned()),
                };
            }
            other => {
                let rendered = other.to_string();
                let message = rendered.lines().next().unwrap_or_default();
                found.message = strip_location(message).to_owned();
            }
        }
        found
    }

    pub(crate) fn from_toml(source: &str, text: &str, error: &toml::de::Error) -> Self {
        let mut found = match error.span() {
            Some(span) => {
                let before = &text[..span.start.min(text.len())];
                let line = before.matches('\n').count() as u64 + 1;
                let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) as u64 + 1;
                Self::at(source, text, (line, column), String::new())
            }
            None => Self::whole(source, String::new()),
        };
        found.message = error.message().to_owned();
        // serde's own words: "unknown field `x`, expected one of `a`, `b`".
        if let Some(rest) = error.message().strip_prefix("unknown field `") {
            let mut quoted = rest.split('`').step_by(2).map(str::to_owned);
            let field = quoted.next().unwrap_or_default();
            let names: Vec<_> = rest.split('`').skip(2).step_by(2).collect();
            found.message = format!("unknown key {field:?}");
            found.hint = Some(unknown_hint(&field, names.iter().copied()));
        }
        found
    }
}

fn unknown_hint<'a>(field: &str, expected: impl Iterator<Item = &'a str> + Clone) -> String {
    match did_you_mean(field, expected.clone()) {
        Some(name) => format!("did you mean {name:?}?"),
        None => format!("known here: {}", expected.collect::<Vec<_>>().join(", ")),
    }
}

fn line_of(text: &str, line: u64) -> Option<String> {
    let line = text.lines().nth(line.checked_sub(1)? as usize)?;
    (line.len() <= 200).then(|| line.to_owned())
}

fn first_line_with_key(text: &str, key: &str) -> Option<u64> {
    let position = text.lines().position(|line| {
        line.trim_start_matches([' ', '-', '{', '"', '\''])
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start_matches(['"', '\'']).starts_with(':'))
    })?;
    Some(position as u64 + 1)
}

/// The reader ends or begins its messages with the place, which is shown already.
fn strip_location(message: &str) -> &str {
    let message = message.split(" at line ").next().unwrap_or(message);
    message.strip_prefix("error: ").unwrap_or(message)
}
