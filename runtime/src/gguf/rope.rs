//! The scaling of Llama 3's rotary embedding, from the factors that it amounts to.
//!
//! The converter writes no parameters but, in `rope_freqs.weight`, what each frequency is divided by. Served drafts need
//! the parameters, so they are worked out again and must give the same factors.

use std::f64::consts::TAU;

/// How much factors may differ, over the factor: they are stored in single precision.
const TOLERANCE: f64 = 1e-5;

/// Parameters of `rope_type` `llama3`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Llama3Scaling {
    pub(super) factor: f64,
    pub(super) low_freq_factor: f64,
    pub(super) high_freq_factor: f64,
    pub(super) original_max_position_embeddings: f64,
}

impl Llama3Scaling {
    /// The parameters whose factors are `factors`, one per pair of dimensions of a head, with base `theta`.
    ///
    /// Only ratios of the lengths matter, so `low_freq_factor` can be 1, as in all published models.
    pub(super) fn of_factors(factors: &[f32], theta: f64) -> Option<Self> {
        let factors: Vec<f64> = factors.iter().map(|&factor| f64::from(factor)).collect();
        let factor = factors.iter().copied().fold(1.0, f64::max);
        let published = Self {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        // What cannot be worked out, because too few frequencies are between the ends, is taken to be as published.
        let usual = (4..=20).map(|bits| Self {
            original_max_position_embeddings: f64::from(1 << bits),
            ..published
        });
        let between = published.between(&factors, theta);
        [published]
            .into_iter()
            .chain(usual)
            .chain(published.at_one(&between))
            .chain(published.fitted(&between))
            .flat_map(|scaling| [scaling.rounded(), scaling])
            .find(|scaling| scaling.gives(&factors, theta))
    }

    /// Frequency and weight of the unscaled one where factors are between 1 and the largest: they lie on a line.
    fn between(&self, factors: &[f64], theta: f64) -> Vec<(f64, f64)> {
        factors
            .iter()
            .zip(wavelengths(factors.len(), theta))
            .filter(|&(&factor, _)| factor > 1.0 + TOLERANCE && factor < self.factor * (1.0 - TOLERANCE))
            .map(|(factor, wave)| {
                let smooth = (factor.recip() - self.factor.recip()) / (1.0 - self.factor.recip());
                (wave.recip(), smooth)
            })
            .collect()
    }

    /// The length with which the line goes through the first point.
    fn at_one(self, between: &[(f64, f64)]) -> Option<Self> {
        let &(frequency, smooth) = between.first()?;
        let periods = smooth * (self.high_freq_factor - self.low_freq_factor) + self.low_freq_factor;
        Some(Self {
            original_max_position_embeddings: periods / frequency,
            ..self
        })
    }

    /// The parameters of the line through the first and the last point.
    fn fitted(self, between: &[(f64, f64)]) -> Option<Self> {
        let (&(x0, y0), &(x1, y1)) = (between.first()?, between.last()?);
        let slope = (y1 - y0) / (x1 - x0);
        let intercept = slope * x0 - y0;
        let fitted = Self {
            high_freq_factor: 1.0 + intercept.recip(),
            original_max_position_embeddings: slope / intercept,
            ..self
        };
        let sound = |value: f64| value.is_finite() && value > 0.0;
        (sound(fitted.high_freq_factor) && sound(fitted.original_max_position_embeddings)).then_some(fitted)
    }

    /// What a person would have written.
    fn rounded(self) -> Self {
        let thousandths = |value: f64| (value * 1000.0).round() / 1000.0;
        Self {
            high_freq_factor: thousandths(self.high_freq_factor),
            original_max_position_embeddings: self.original_max_position_embeddings.round(),
            ..self
        }
    }

    fn gives(&self, factors: &[f64], theta: f64) -> bool {
        let waves = wavelengths(factors.len(), theta);
        factors
            .iter()
            .zip(waves)
            .all(|(&factor, wave)| (self.factor_at(wave) - factor).abs() <= TOLERANCE * factor)
    }

    /// What the frequency of a wavelength (in tokens) is divided by.
    fn factor_at(&self, wavelength: f64) -> f64 {
        let periods = self.original_max_position_embeddings / wavelength;
        if periods > self.high_freq_factor {
            return 1.0;
        }
        if periods < self.low_freq_factor {
            return self.factor;
        }
        let smooth = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        ((1.0 - smooth) / self.factor + smooth).recip()
    }
}

/// Wavelengths in tokens of the pairs of dimensions of a head.
fn wavelengths(pairs: usize, theta: f64) -> impl Iterator<Item = f64> {
    (0..pairs).map(move |pair| TAU * theta.powf(pair as f64 / pairs as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(scaling: &Llama3Scaling, pairs: usize, theta: f64) -> Vec<f32> {
        wavelengths(pairs, theta)
            .map(|wave| scaling.factor_at(wave) as f32)
            .collect()
    }

    #[test]
    fn parameters_are_found_again() {
        for (factor, low, high, original, pairs, theta) in [
            (8.0, 1.0, 4.0, 8192.0, 64, 500_000.0),
            (32.0, 1.0, 4.0, 8192.0, 32, 500_000.0),
            (4.0, 1.0, 2.5, 4096.0, 64, 1_000_000.0),
            (16.0, 1.0, 8.0, 32768.0, 40, 10_000.0),
            (8.0, 1.0, 4.0, 300.0, 6, 10_000.0),
            (8.0, 1.0, 4.0, 64.0, 6, 10_000.0),
        ] {
            let scaling = Llama3Scaling {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            };
            let found = Llama3Scaling::of_factors(&factors(&scaling, pairs, theta), theta);
            assert_eq!(found, Some(scaling));
        }
    }

    #[test]
    fn other_low_factors_give_the_same_factors() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 2.0,
            high_freq_factor: 6.0,
            original_max_position_embeddings: 8192.0,
        };
        let stored = factors(&scaling, 64, 500_000.0);
        let found = Llama3Scaling::of_factors(&stored, 500_000.0).expect("the same shape");
        assert_eq!((found.low_freq_factor, found.high_freq_factor), (1.0, 3.0));
        assert_eq!(found.original_max_position_embeddings, 4096.0);
    }

    #[test]
    fn factors_of_another_kind_are_not_taken_for_these() {
        assert_eq!(Llama3Scaling::of_factors(&[1.0, 3.0, 1.5, 8.0], 10_000.0), None);
        assert_eq!(Llama3Scaling::of_factors(&[1.0, f32::NAN, 8.0], 10_000.0), None);
        assert_eq!(Llama3Scaling::of_factors(&[8.0, 4.0, 1.0, 1.0], 10_000.0), None);
    }
}
