//! Numbers as a person reads them at a glance.

use eaglet_runtime::ids::Epoch;

/// Three digits or more with a unit prefix: `999`, `1.2k`, `34k`, `5.6M`.
pub(crate) fn short(number: f64) -> String {
    let (mut value, mut unit) = (number, "");
    for next in ["k", "M", "G"] {
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit.is_empty() || value >= 9.95 {
        format!("{value:.0}{unit}")
    } else {
        format!("{value:.1}{unit}")
    }
}

/// Whole numbers with thousands set apart: `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes in the largest binary unit that keeps a whole number: `412 MiB`, `1.5 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let mib = count as f64 / MIB;
    if mib < 1000.0 {
        format!("{mib:.0} MiB")
    } else {
        format!("{:.1} GiB", mib / 1024.0)
    }
}

/// Seconds as the two largest units: `8s`, `3m 12s`, `2h 05m`, `4d 03h`.
pub(crate) fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h {:02}m", minutes % 60),
        _ => format!("{days}d {:02}h", hours % 24),
    }
}

/// An epoch: the launch, in its upper half, and the membership within the launch: `0.3`.
pub(crate) fn epoch(epoch: Epoch) -> String {
    format!("{}.{}", epoch.0 >> 32, epoch.0 & u64::from(u32::MAX))
}

/// A part of one, in per cent: `61 %`.
pub(crate) fn percent(part: f32) -> String {
    format!("{:.0} %", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_at_every_magnitude() {
        let cases = [
            (0.0, "0"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1234.0, "1.2k"),
            (9960.0, "10k"),
            (5.6e6, "5.6M"),
        ];
        for (number, text) in cases {
            assert_eq!(short(number), text);
        }
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [0, 412 << 20, 1536 << 20].map(bytes),
            ["0 MiB", "412 MiB", "1.5 GiB"]
        );
        assert_eq!(
            [8, 192, 7500, 356_400].map(duration),
            ["8s", "3m 12s", "2h 05m", "4d 03h"]
        );
        assert_eq!(
            [2, (1 << 32) + 10].map(|number| epoch(Epoch(number))),
            ["0.2", "1.10"]
        );
        assert_eq!([0.0, 0.614, 1.0].map(percent), ["0 %", "61 %", "100 %"]);
    }
}
