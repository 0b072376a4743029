//! The line by which a process says that it serves: `ready`, then `key=value` words.

use std::net::SocketAddr;

use anyhow::Context;

/// A readiness line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    line: String,
}

impl Ready {
    /// Reads a line of standard output, if it is a readiness line.
    pub fn parse(line: &str) -> Option<Self> {
        let is_ready = line.split_whitespace().next() == Some("ready");
        is_ready.then(|| Self {
            line: line.to_owned(),
        })
    }

    /// What the line says about `key`.
    pub fn value(&self, key: &str) -> anyhow::Result<&str> {
        let values = self
            .line
            .split_whitespace()
            .filter_map(|word| word.split_once('='));
        let mut values = values
            .filter(|(known, _)| *known == key)
            .map(|(_, value)| value);
        values
            .next()
            .with_context(|| format!("`{}` does not say {key}=…", self.line))
    }

    /// An address in the line.
    pub fn address(&self, key: &str) -> anyhow::Result<SocketAddr> {
        let value = self.value(key)?;
        value
            .parse()
            .with_context(|| format!("{key}={value} in `{}` is not an address", self.line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_that_begins_with_ready_counts() {
        let ready = Ready::parse("ready quic=127.1.0.4:4433 http=nowhere").unwrap();
        assert_eq!(
            ready.address("quic").unwrap(),
            "127.1.0.4:4433".parse().unwrap()
        );
        assert!(
            ready
                .address("http")
                .unwrap_err()
                .to_string()
                .contains("http=nowhere")
        );
        assert!(
            ready
                .value("control")
                .unwrap_err()
                .to_string()
                .contains("does not say control=")
        );
        assert_eq!(Ready::parse("already there"), None);
        assert_eq!(Ready::parse("readying"), None);
        assert_eq!(Ready::parse(""), None);
    }
}
