//! Printing: tables with upper-case headers and no boxes, JSON, YAML, names.

use std::io::Write;

use comfy_table::{Table, presets};
use serde::Serialize;

use crate::arguments::{Format, Global};

/// A printable thing: its data, and its rows for people.
pub(crate) struct Shown<T> {
    pub(crate) data: T,
    pub(crate) names: Vec<String>,
    pub(crate) header: Vec<&'static str>,
    /// How many of the columns a plain table shows; the rest is for `-o wide`.
    pub(crate) narrow: usize,
    pub(crate) rows: Vec<Vec<String>>,
}

impl<T: Serialize> Shown<T> {
    pub(crate) fn print(self, global: &Global) -> anyhow::Result<()> {
        let text = match global.output {
            Format::Json => format!("{}\n", serde_json::to_string_pretty(&self.data)?),
            Format::Yaml => to_yaml(&self.data)?,
            Format::Name => self.names.iter().map(|name| format!("{name}\n")).collect(),
            Format::Table => table(&self.header[..self.narrow], &self.rows),
            Format::Wide => table(&self.header, &self.rows),
        };
        print(global, &text)
    }
}

/// Prints data that has a text of its own for people.
pub(crate) fn print_text<T: Serialize>(
    global: &Global,
    data: &T,
    name: &str,
    text: &str,
) -> anyhow::Result<()> {
    match global.output {
        Format::Json => print(
            global,
            &format!("{}\n", serde_json::to_string_pretty(data)?),
        ),
        Format::Yaml => print(global, &to_yaml(data)?),
        Format::Name => print(global, &format!("{name}\n")),
        Format::Table | Format::Wide => print(global, text),
    }
}

fn to_yaml<T: Serialize>(data: &T) -> anyhow::Result<String> {
    // Through JSON, so that keys that are not text (a digest, a pair) look the same in both formats.
    let json = serde_json::to_value(data)?;
    serde_saphyr::to_string(&json)
        .map_err(|error| anyhow::anyhow!("cannot be written as YAML: {error}"))
}

pub(crate) fn print(global: &Global, text: &str) -> anyhow::Result<()> {
    if global.quiet {
        return Ok(());
    }
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// Rows under upper-case headers, two spaces between columns, no trailing blanks.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().map(|h| h.to_uppercase()));
    for row in rows {
        table.add_row(row.iter().take(header.len()));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
        .to_string()
        .lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// `12s`, `3m`, `5h`, `2d`
pub(crate) fn age(since_unix_ms: u64) -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64);
    duration(now.saturating_sub(since_unix_ms) / 1000)
}

/// The same for a number of seconds.
pub(crate) fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Whether the reader of our output has gone away (`compass node list | head`).
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field report 91: what is saved from here is read as the same text again, as key and as value.
    #[test]
    fn field_091_names_survive_being_written_as_yaml_and_read_again() {
        let names = [
            "no", "on", "1.10", "012", "true", "12:30", "~", "null", "0x1f", "1e3", "-1",
        ];
        let data: std::collections::BTreeMap<&str, Vec<&str>> =
            names.iter().map(|name| (*name, vec![*name])).collect();
        let text = to_yaml(&data).unwrap();
        let read: std::collections::BTreeMap<String, Vec<serde_json::Value>> =
            serde_saphyr::from_str(&text).unwrap();
        assert_eq!(read.len(), names.len(), "{text}");
        for (key, values) in read {
            assert!(names.contains(&key.as_str()), "{key}: {text}");
            assert_eq!(values, [serde_json::Value::String(key)], "{text}");
        }
    }

    #[test]
    fn tables_are_plain() {
        let text = table(
            &["name", "age"],
            &[
                vec!["edge-1".to_owned(), duration(200)],
                vec!["x".to_owned(), duration(3)],
            ],
        );
        assert_eq!(text, "NAME    AGE\nedge-1  3m\nx       3s\n");
    }
}
