//! Quantities as people write them: a number and a unit, always both.
//!
//! Each type here wraps the model's type, reads `"300ms"`-like text and refuses numbers without a unit, unknown units, and values outside the
//! range any real deployment has. Units are matched whole and case-sensitively, so `ms` is never taken for `m`.

use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::suggest::did_you_mean;
use crate::units::{Bandwidth, Millicores, Rate};

/// A unit and how many base units it is.
type Unit = (&'static str, f64);

/// Splits a text into number and unit and converts to the base unit.
fn parse(text: &str, what: &str, example: &str, units: &[Unit]) -> Result<f64, String> {
    let names = || {
        units
            .iter()
            .map(|(name, _)| *name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..split], trimmed[split..].trim());
    if trimmed.starts_with('-') {
        return Err(format!("{what} {text:?} is negative"));
    }
    let value: f64 = number.parse().map_err(|_| {
        format!("{what} {text:?} must be a number and a unit, for example {example}")
    })?;
    if unit.is_empty() {
        return Err(format!(
            "{what} {text:?} has no unit: write for example {number}{}{}",
            if example.contains(' ') { " " } else { "" },
            units[0].0
        ));
    }
    if let Some((_, factor)) = units.iter().find(|(name, _)| *name == unit) {
        return Ok(value * factor);
    }
    let guess = ambiguous(unit)
        .filter(|guess| units.iter().any(|(name, _)| guess.contains(name)))
        .map(str::to_owned);
    let guess = guess.or_else(|| {
        did_you_mean(unit, units.iter().map(|(name, _)| *name))
            .map(|name| format!("{number}{name}"))
    });
    let hint = match guess {
        Some(guess) if guess.starts_with(|c: char| c.is_ascii_digit()) => {
            format!("did you mean {guess}?")
        }
        Some(guess) => format!("did you mean {guess}?"),
        None => format!("units are {}", names()),
    };
    Err(format!(
        "{what} {text:?} has an unknown unit {unit:?}: {hint}"
    ))
}

/// Units that other tools read in surprising ways.
fn ambiguous(unit: &str) -> Option<&'static str> {
    match unit {
        "m" => Some("ms (milliseconds) or min (minutes)"),
        "M" => Some("min (minutes) or ms (milliseconds)"),
        _ => None,
    }
}

fn in_range(
    value: f64,
    text: &str,
    what: &str,
    low: (f64, &str),
    high: (f64, &str),
) -> Result<f64, String> {
    if value < low.0 || value > high.0 {
        return Err(format!(
            "{what} {text:?} is implausible: it must lie between {} and {}",
            low.1, high.1
        ));
    }
    Ok(value)
}

const TIME: &[Unit] = &[
    ("ms", 1e-3),
    ("s", 1.0),
    ("us", 1e-6),
    ("min", 60.0),
    ("h", 3600.0),
    ("d", 86_400.0),
];

macro_rules! quantities {
    ($($(#[$doc:meta])* $name:ident($inner:ty) = $what:literal, $example:literal, |$text:ident| $read:expr, |$value:ident| $write:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $name(pub $inner);

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str($text: &str) -> Result<Self, String> {
                let what = $what;
                let _ = what;
                ($read)(what).map($name)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = deserializer.deserialize_any(Text { what: $what, example: $example })?;
                text.parse().map_err(de::Error::custom)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $value = self.0;
                serializer.serialize_str(&$write)
            }
        }
    )*};
}

quantities! {
    /// A duration between 0 and 24 h, for example `20s`.
    WrittenDuration(Duration) = "duration", "20s",
        |text| |what: &str| parse(text, what, "20s", TIME).and_then(|s| in_range(s, text, what, (0.0, "0s"), (86_400.0, "24h"))).map(Duration::from_secs_f64),
        |value| format!("{}us", value.as_micros());
    /// A bound on latency between 1 ms and 1 h, for example `300ms`.
    WrittenLatency(Duration) = "latency", "300ms",
        |text| |what: &str| parse(text, what, "300ms", TIME).and_then(|s| in_range(s, text, what, (1e-3, "1ms"), (3600.0, "1h"))).map(Duration::from_secs_f64),
        |value| format!("{}us", value.as_micros());
    /// A rate between one a day and 1000/s, for example `10/s`.
    WrittenRate(Rate) = "rate", "10/s",
        |text| |what: &str| parse(text, what, "10/s", &[("/s", 1.0), ("/min", 1.0 / 60.0), ("/h", 1.0 / 3600.0), ("fps", 1.0)])
            .and_then(|hz| in_range(hz, text, what, (0.001, "0.001/s"), (1000.0, "1000/s"))).map(Rate::per_second),
        |value| format!("{}/s", value.hz());
    /// A data rate up to 1 Tbit/s, for example `18 Mbit/s`.
    WrittenBandwidth(Bandwidth) = "bandwidth", "18 Mbit/s",
        |text| |what: &str| parse(text, what, "18 Mbit/s", &[("Mbit/s", 1e6), ("kbit/s", 1e3), ("Gbit/s", 1e9), ("bit/s", 1.0)])
            .and_then(|bps| in_range(bps, text, what, (0.0, "0 bit/s"), (1e12, "1000 Gbit/s"))).map(|bps| Bandwidth(bps as u64)),
        |value| format!("{} bit/s", value.0);
    /// A size in memory up to 64 TiB, in MiB, for example `512 MiB`.
    WrittenMemory(u32) = "memory", "512 MiB",
        |text| |what: &str| parse(text, what, "512 MiB", &[("MiB", 1.0), ("GiB", 1024.0), ("KiB", 1.0 / 1024.0)])
            .and_then(|mib| in_range(mib, text, what, (0.0, "0 MiB"), (67_108_864.0, "65536 GiB"))).map(|mib| mib.ceil() as u32),
        |value| format!("{value} MiB");
    /// A CPU capacity up to 4096 cores, for example `2 cores` or `500m`.
    WrittenCpu(Millicores) = "cpu", "2 cores",
        |text| |what: &str| parse(text, what, "2 cores", &[("cores", 1000.0), ("core", 1000.0), ("m", 1.0)])
            .and_then(|m| in_range(m, text, what, (0.0, "0m"), (4_096_000.0, "4096 cores"))).map(|m| Millicores(m as u32)),
        |value| format!("{}m", value.0);
    /// USD per hour, for example `0.40 USD/h`.
    WrittenHourly(f64) = "price", "0.40 USD/h",
        |text| |what: &str| parse(text, what, "0.40 USD/h", &[("USD/h", 1.0)]).and_then(|usd| in_range(usd, text, what, (0.0, "0 USD/h"), (1e6, "1000000 USD/h"))),
        |value| format!("{value} USD/h");
    /// USD per gigabyte (10⁹ bytes), for example `0.09 USD/GB`.
    WrittenPerGigabyte(f64) = "price", "0.09 USD/GB",
        |text| |what: &str| parse(text, what, "0.09 USD/GB", &[("USD/GB", 1.0)]).and_then(|usd| in_range(usd, text, what, (0.0, "0 USD/GB"), (1e3, "1000 USD/GB"))),
        |value| format!("{value} USD/GB");
    /// A cap on cost: `0.40 USD/h` for a continuous query, `0.002 USD` per request for a one-shot one.
    WrittenCost(crate::model::query::CostSlo) = "cost", "0.40 USD/h",
        |text| |what: &str| cost(text, what),
        |value| match value {
            crate::model::query::CostSlo::PerHour(usd) => format!("{usd} USD/h"),
            crate::model::query::CostSlo::PerRequest(usd) => format!("{usd} USD"),
        };
}

fn cost(text: &str, what: &str) -> Result<crate::model::query::CostSlo, String> {
    use crate::model::query::CostSlo;
    let limit = |usd| in_range(usd, text, what, (0.0, "0 USD"), (1e6, "1000000 USD"));
    match parse(text, what, "0.40 USD/h", &[("USD/h", 1.0)]) {
        Ok(usd) => limit(usd).map(CostSlo::PerHour),
        Err(error) => match parse(text, what, "0.002 USD", &[("USD", 1.0)]) {
            Ok(usd) => limit(usd).map(CostSlo::PerRequest),
            Err(_) => Err(error),
        },
    }
}

/// A share of the whole, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fraction(pub f64);

impl<'de> Deserialize<'de> for Fraction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(deserializer)?;
        if value.is_finite() && (0.0..=1.0).contains(&value) {
            Ok(Self(value))
        } else {
            Err(de::Error::custom(format!("{value} is not between 0 and 1")))
        }
    }
}

/// Accepts text only; a bare number gets an explanation.
struct Text {
    what: &'static str,
    example: &'static str,
}

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a {} with its unit, for example {}",
            self.what, self.example
        )
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<String, E> {
        Ok(value.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_094_units_are_required_and_matched_whole() {
        let read = |text: &str| text.parse::<WrittenLatency>().map(|l| l.0);
        assert_eq!(read("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(read("100 ms"), Ok(Duration::from_millis(100)));
        assert_eq!(read("0.1s"), Ok(Duration::from_millis(100)));
        assert_eq!(read("1ms"), Ok(Duration::from_millis(1)));
        let error = |text: &str| read(text).unwrap_err();
        assert!(error("100").contains("no unit") && error("100").contains("100ms"));
        assert!(error("100m").contains("did you mean ms"));
        assert!(error("1M").contains("did you mean min"));
        assert!(error("100MS").contains("100ms"), "{}", error("100MS"));
        assert!(error("0ms").contains("implausible"));
        assert!(error("-1s").contains("negative"));
        assert!(error("1e3ms").contains("unit"));
        assert!(error("NaNms").contains("number"));
    }

    #[test]
    fn every_quantity_reads_its_example() {
        assert_eq!(
            "18 Mbit/s".parse::<WrittenBandwidth>().unwrap().0,
            Bandwidth(18_000_000)
        );
        assert_eq!("10/s".parse::<WrittenRate>().unwrap().0.hz(), 10.0);
        assert_eq!("1 GiB".parse::<WrittenMemory>().unwrap().0, 1024);
        assert_eq!("500m".parse::<WrittenCpu>().unwrap().0, Millicores(500));
        assert_eq!("2 cores".parse::<WrittenCpu>().unwrap().0, Millicores(2000));
        assert_eq!(
            "0.40 USD/h".parse::<WrittenCost>().unwrap().0,
            crate::model::query::CostSlo::PerHour(0.4)
        );
        assert_eq!(
            "0.002 USD".parse::<WrittenCost>().unwrap().0,
            crate::model::query::CostSlo::PerRequest(0.002)
        );
        assert!("0.40".parse::<WrittenCost>().unwrap_err().contains("USD/h"));
    }
}
