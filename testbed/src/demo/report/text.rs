//! Text for people: escaping, numbers with their units (held together by a no-break space), times.

/// Text as it stands in HTML and SVG, in attributes too.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML has no way to write the others.
            control if control.is_control() && !matches!(control, '\n' | '\t') => {
                escaped.push('\u{fffd}');
            }
            other => escaped.push(other),
        }
    }
    escaped
}

/// `8.4 ms`, `312 ms`
pub(crate) fn milliseconds(ms: f64) -> String {
    if !ms.is_finite() {
        return "none".to_owned();
    }
    if ms.abs() < 10.0 {
        format!("{ms:.1}\u{a0}ms")
    } else {
        format!("{ms:.0}\u{a0}ms")
    }
}

/// `1.38 s`, `74 s`, from milliseconds.
pub(crate) fn seconds(ms: f64) -> String {
    let s = ms / 1e3;
    if !s.is_finite() {
        "none".to_owned()
    } else if s.abs() < 10.0 {
        format!("{s:.2}\u{a0}s")
    } else {
        format!("{s:.0}\u{a0}s")
    }
}

/// `98.7 %`, from a share of 1; never rounded up to a hundred.
pub(crate) fn percent(part: f64) -> String {
    if !part.is_finite() {
        return "none".to_owned();
    }
    let tenths = (part * 1e3).floor() / 10.0;
    if tenths.fract() == 0.0 {
        format!("{tenths:.0}\u{a0}%")
    } else {
        format!("{tenths:.1}\u{a0}%")
    }
}

/// `0.0312 USD/h`
pub(crate) fn hourly(usd: f64) -> String {
    if usd.is_finite() {
        format!("{usd:.4}\u{a0}USD/h")
    } else {
        "none".to_owned()
    }
}

/// `1.24 MB` (10⁶ bytes)
pub(crate) fn bytes(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.2}\u{a0}GB", count / 1e9),
        count if count >= 1e6 => format!("{:.2}\u{a0}MB", count / 1e6),
        count if count >= 1e3 => format!("{:.1}\u{a0}kB", count / 1e3),
        count => format!("{count:.0}\u{a0}B"),
    }
}

/// `1 frame`, `3 frames`
pub(crate) fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// `2026-11-30 19:15:02 UTC`, from milliseconds since the Unix epoch.
pub(crate) fn utc(unix_ms: f64) -> String {
    let total_s = (unix_ms / 1e3).floor() as i64;
    let (days, of_day) = (total_s.div_euclid(86_400), total_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The Gregorian date of a number of days since 1970-01-01; years begin in March, so that the leap day comes last.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0.0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400_000.0), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_796_066_102_900.0), "2026-11-30 19:15:02 UTC");
    }

    #[test]
    fn numbers_carry_their_units_and_do_not_flatter() {
        assert_eq!(percent(0.9999), "99.9\u{a0}%");
        assert_eq!(percent(1.0), "100\u{a0}%");
        assert_eq!(milliseconds(8.44), "8.4\u{a0}ms");
        assert_eq!(seconds(1380.0), "1.38\u{a0}s");
        assert_eq!(bytes(1_240_000.0), "1.24\u{a0}MB");
        assert_eq!(counted(1, "frame"), "1 frame");
    }

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(
            escape("<a href=\"x\">&'\u{1}"),
            "&lt;a href=&quot;x&quot;&gt;&amp;&#39;\u{fffd}"
        );
    }
}
