//! Numbers as people read them.

/// Bytes in decimal units, as disks and models are measured: `14.4 GB`.
pub fn size(bytes: u64) -> String {
    format!("{}B", prefixed(bytes as f64))
}

/// Up to three digits, and a decimal prefix behind a blank: `14.4 G`.
pub fn prefixed(number: f64) -> String {
    let (mut value, mut unit) = (number, "");
    for next in ["k", "M", "G", "T", "P"] {
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit.is_empty() || value >= 99.95 {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (57_344, "57.3 kB"),
            (14_400_000_000, "14.4 GB"),
            (541_000_000_000, "541 GB"),
            (1_500_000_000_000, "1.5 TB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(prefixed(829_452_288.0), "829 M");
    }
}
