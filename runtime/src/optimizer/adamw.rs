//! AdamW over flat vectors.

use serde::{Deserialize, Serialize};

use crate::device::{AdamWUpdate, Buffer, Device, Floats, FloatsMut};

/// Added to the gradient's norm when it is clipped, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// Settings of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWSpec {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, applied to every parameter.
    pub weight_decay: f64,
    /// The gradient is scaled down to this norm when it is longer; `None` leaves it alone.
    pub clip_norm: Option<f64>,
}

impl Default for AdamWSpec {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            clip_norm: Some(1.0),
        }
    }
}

/// AdamW and its moments.
#[derive(Debug)]
pub struct AdamW {
    /// Settings.
    pub spec: AdamWSpec,
    /// Updates done.
    pub updates: u64,
    /// First moment, `[parameters]`.
    pub m: Buffer,
    /// Second moment, `[parameters]`.
    pub v: Buffer,
}

/// Vectors of an update differ in length.
#[derive(Debug, thiserror::Error)]
#[error("{what} has {found} elements where the optimizer has {expected}")]
pub struct LengthError {
    what: &'static str,
    found: usize,
    expected: usize,
}

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// What the gradient was multiplied by.
    pub gradient_scale: f32,
}

impl AdamW {
    /// Moments of zero for this many parameters.
    pub fn new(spec: AdamWSpec, device: &impl Device, parameters: usize) -> Self {
        let zeros = |name| {
            let mut moment = Buffer::default();
            device.fit(&mut moment, name, parameters);
            device.fill(moment.floats_mut(), 0.0);
            moment
        };
        Self {
            spec,
            updates: 0,
            m: zeros("first moments"),
            v: zeros("second moments"),
        }
    }

    /// One update of `parameters` in place. A gradient with a norm that is not finite is the caller's to refuse:
    /// look at [`gradient_norm`](Self::gradient_norm) first.
    ///
    /// # Errors
    /// If a vector has the wrong length; nothing is changed then.
    pub fn update<'a>(
        &mut self,
        device: &impl Device,
        parameters: impl Into<FloatsMut<'a>>,
        gradient: impl Into<Floats<'a>>,
        learning_rate: f64,
    ) -> Result<UpdateReport, LengthError> {
        let (parameters, gradient) = (parameters.into(), gradient.into());
        let expected = self.m.len();
        let lengths = [
            ("parameter vector", parameters.len()),
            ("gradient", gradient.len()),
            ("second moment", self.v.len()),
        ];
        for (what, found) in lengths {
            if found != expected {
                return Err(LengthError {
                    what,
                    found,
                    expected,
                });
            }
        }
        device.stage("optimizer");
        let gradient_norm = Self::gradient_norm(device, gradient);
        let gradient_scale = match self.spec.clip_norm {
            Some(limit) => (limit / (gradient_norm + CLIP_EPSILON)).min(1.0) as f32,
            None => 1.0,
        };
        self.updates += 1;
        let update = AdamWUpdate {
            learning_rate,
            beta1: self.spec.beta1,
            beta2: self.spec.beta2,
            epsilon: self.spec.epsilon,
            weight_decay: self.spec.weight_decay,
            number: self.updates,
            gradient_scale,
        };
        device.adamw(
            &update,
            parameters,
            self.m.floats_mut(),
            self.v.floats_mut(),
            gradient,
        );
        Ok(UpdateReport {
            gradient_norm,
            gradient_scale,
        })
    }

    /// Norm of a gradient, summed in f64 and in fixed order.
    pub fn gradient_norm<'a>(device: &impl Device, gradient: impl Into<Floats<'a>>) -> f64 {
        device.sum_of_squares(gradient.into()).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;

    #[test]
    fn a_long_gradient_is_clipped_and_a_short_one_is_not() {
        let device = Cpu::new(1).expect("a thread");
        let mut optimizer = AdamW::new(AdamWSpec::default(), &device, 2);
        let mut parameters = [1.0f32, -1.0];
        let report = optimizer
            .update(&device, &mut parameters, &[3.0, 4.0], 0.1)
            .expect("lengths fit");
        assert_eq!(report.gradient_norm, 5.0);
        assert!((f64::from(report.gradient_scale) - 1.0 / (5.0 + 1e-6)).abs() < 1e-8);
        // The first update of Adam moves each parameter by the learning rate, whatever the gradient's size.
        assert!(
            (parameters[0] - (1.0 - 0.001 - 0.1)).abs() < 1e-6,
            "{parameters:?}"
        );
        let report = optimizer
            .update(&device, &mut parameters, &[0.3, 0.4], 0.1)
            .expect("lengths fit");
        assert_eq!(report.gradient_scale, 1.0);
        assert_eq!(optimizer.updates, 2);
    }

    #[test]
    fn a_wrong_length_changes_nothing() {
        let device = Cpu::new(1).expect("a thread");
        let mut optimizer = AdamW::new(AdamWSpec::default(), &device, 2);
        let error = optimizer
            .update(&device, &mut [1.0, 2.0], &[1.0], 0.1)
            .expect_err("too short");
        assert_eq!(
            error.to_string(),
            "gradient has 1 elements where the optimizer has 2"
        );
        let moments = [&optimizer.m, &optimizer.v].map(|moment| device.read(moment.floats()));
        assert_eq!((optimizer.updates, moments), (0, [vec![0.0; 2], vec![0.0; 2]]));
    }
}
