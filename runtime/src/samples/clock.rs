//! The date that chat templates may ask for.
//!
//! Some templates write today's date into the system message. It is taken once, when the template is loaded, and in UTC:
//! all samples of a run carry the same date wherever they are rendered.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Seconds since 1970 in UTC; 0 for a clock that stands before that.
pub(crate) fn now_unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A point in time by the Gregorian calendar, in UTC.
struct Civil {
    year: u64,
    /// From 1.
    month: usize,
    /// From 1.
    day: u64,
    day_of_year: u64,
    /// From Sunday, 0.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Civil {
    /// Days are counted in eras of 400 years that begin on the first of March, so that leap days come last.
    fn at(unix_s: u64) -> Self {
        let days = unix_s / 86_400;
        let (era, day_of_era) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * from_march + 2) / 153;
        let day = from_march - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 {
            shifted_month + 3
        } else {
            shifted_month - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month <= 2 {
            from_march - 305
        } else {
            from_march + 60 + u64::from(leap)
        };
        let second = unix_s % 86_400;
        Self {
            year,
            month: month as usize,
            day,
            day_of_year,
            weekday: ((days + 4) % 7) as usize,
            hour: second / 3_600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }
}

/// Formats a point in time as C's `strftime` does in the POSIX locale; `None` for a directive that is not known.
pub(crate) fn strftime(format: &str, unix_s: u64) -> Option<String> {
    let at = Civil::at(unix_s);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next()?;
        let unpadded = directive == '-';
        if unpadded {
            directive = characters.next()?;
        }
        let month = MONTHS[at.month - 1];
        let weekday = WEEKDAYS[at.weekday];
        let twelve = (at.hour + 11) % 12 + 1;
        // Width and value of the numeric directives; the others are texts.
        let (width, number) = match directive {
            'Y' => (4, at.year),
            'y' => (2, at.year % 100),
            'm' => (2, at.month as u64),
            'd' => (2, at.day),
            'e' => {
                let _ = write!(out, "{:>2}", at.day);
                continue;
            }
            'j' => (3, at.day_of_year),
            'H' => (2, at.hour),
            'I' => (2, twelve),
            'M' => (2, at.minute),
            'S' => (2, at.second),
            _ => {
                match directive {
                    'B' => out.push_str(month),
                    'b' | 'h' => out.push_str(&month[..3]),
                    'A' => out.push_str(weekday),
                    'a' => out.push_str(&weekday[..3]),
                    'p' => out.push_str(if at.hour < 12 { "AM" } else { "PM" }),
                    'F' => out.push_str(&strftime("%Y-%m-%d", unix_s)?),
                    'T' => out.push_str(&strftime("%H:%M:%S", unix_s)?),
                    'Z' => out.push_str("UTC"),
                    'z' => out.push_str("+0000"),
                    '%' => out.push('%'),
                    _ => return None,
                }
                continue;
            }
        };
        let width = if unpadded { 0 } else { width };
        let _ = write!(out, "{number:0width$}");
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants_are_written_as_python_writes_them() {
        // Expected values from Python's datetime.fromtimestamp(s, timezone.utc).strftime.
        let format = "%a %A %d %b %B %Y %y %j %H:%M:%S %I%p %-d/%-m %e %F %%";
        for (unix_s, expected) in [
            (
                0,
                "Thu Thursday 01 Jan January 1970 70 001 00:00:00 12AM 1/1  1 1970-01-01 %",
            ),
            (
                951_782_400,
                "Tue Tuesday 29 Feb February 2000 00 060 00:00:00 12AM 29/2 29 2000-02-29 %",
            ),
            (
                951_868_800,
                "Wed Wednesday 01 Mar March 2000 00 061 00:00:00 12AM 1/3  1 2000-03-01 %",
            ),
            (
                1_735_689_599,
                "Tue Tuesday 31 Dec December 2024 24 366 23:59:59 11PM 31/12 31 2024-12-31 %",
            ),
            (
                4_107_542_400,
                "Mon Monday 01 Mar March 2100 00 060 00:00:00 12AM 1/3  1 2100-03-01 %",
            ),
        ] {
            assert_eq!(strftime(format, unix_s).as_deref(), Some(expected));
        }
    }

    #[test]
    fn unknown_directives_are_told() {
        assert_eq!(strftime("%Q", 0), None);
        assert_eq!(strftime("%", 0), None);
        assert_eq!(strftime("%-", 0), None);
    }
}
