//! Loops over the elements of one row or block, compiled for several instruction sets and chosen at run time.
//!
//! Each kernel is ordinary Rust that LLVM vectorises. Reductions keep [`LANES`] partial sums and fold them in fixed
//! order, so a wider vector unit gives the same bits; only the presence of fused multiply-add changes them.
#![allow(unsafe_code)]

use half::bf16;

use crate::device::AdamWUpdate;
use crate::device::checksum::checksum_from;

/// Partial sums of a reduction.
const LANES: usize = 32;

/// `a · b + c`, fused where the machine has it.
#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA || cfg!(target_arch = "aarch64") {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// e^x, relative error below 2e-7, for x clamped to [-87, 88]; the polynomial of Cephes' `expf`.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low bits
    let x = x.clamp(-87.0, 88.0);
    let rounded = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let p = fma::<FMA>(1.987_569_1e-4, r, 1.398_2e-3);
    let p = fma::<FMA>(p, r, 8.333_452e-3);
    let p = fma::<FMA>(p, r, 4.166_579_6e-2);
    let p = fma::<FMA>(p, r, 1.666_666_5e-1);
    let p = fma::<FMA>(p, r, 0.5);
    let y = fma::<FMA>(r * r, p, r + 1.0);
    // The exponent of y plus n: ROUND's own bits are shifted out.
    f32::from_bits(y.to_bits().wrapping_add(rounded.to_bits() << 23))
}

#[inline(always)]
fn fold(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Σ f(x, y) over two equally long slices.
#[inline(always)]
fn reduce2(x: &[f32], y: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [0.0_f32; LANES];
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..LANES {
            lanes[lane] = f(x[lane], y[lane], lanes[lane]);
        }
    }
    for (lane, (&x, &y)) in x_rest.iter().zip(y_rest).enumerate() {
        lanes[lane] = f(x, y, lanes[lane]);
    }
    fold(lanes)
}

/// Largest element, −∞ of none.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] {
                chunk[lane]
            } else {
                lanes[lane]
            };
        }
    }
    rest.iter()
        .chain(&lanes)
        .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

macro_rules! kernels {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn portable<const FMA: bool>($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) $(-> $result)? {
                    portable::<true>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $type),*) $(-> $result)? {
                    portable::<true>($($arg),*)
                }
                if is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("fma")
                {
                    // SAFETY: the machine has the features.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the machine has the features.
                    return unsafe { avx2($($arg),*) };
                }
            }
            portable::<false>($($arg),*)
        }
    )*};
}

kernels! {
    /// Σ x·y.
    fn dot(x: &[f32], y: &[f32]) -> f32 {
        reduce2(x, y, fma::<FMA>)
    }

    /// y += a·x.
    fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = fma::<FMA>(a, x, *y);
        }
    }

    /// y += x.
    fn add(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }

    /// y = x / rms(x) · weight; returns 1 / rms(x).
    fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) -> f32 {
        let squares = reduce2(x, x, fma::<FMA>);
        let rstd = 1.0 / (squares / x.len() as f32 + epsilon).sqrt();
        for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
            *y = x * rstd * weight;
        }
        rstd
    }

    /// Adds the input gradient of `rms_norm` to dx.
    fn rms_norm_backward(x: &[f32], weight: &[f32], rstd: f32, dy: &[f32], dx: &mut [f32]) {
        let mut lanes = [0.0_f32; LANES];
        for ((x, w), g) in x.chunks(LANES).zip(weight.chunks(LANES)).zip(dy.chunks(LANES)) {
            if x.len() == LANES {
                for lane in 0..LANES {
                    lanes[lane] = fma::<FMA>(g[lane] * w[lane], x[lane], lanes[lane]);
                }
            } else {
                for (lane, ((&x, &w), &g)) in x.iter().zip(w).zip(g).enumerate() {
                    lanes[lane] = fma::<FMA>(g * w, x, lanes[lane]);
                }
            }
        }
        let along = fold(lanes) * rstd * rstd * rstd / x.len() as f32;
        for (((dx, &x), &w), &g) in dx.iter_mut().zip(x).zip(weight).zip(dy) {
            *dx += g * w * rstd - x * along;
        }
    }

    /// dw += dy · x · rstd, element by element.
    fn rms_norm_weight(x: &[f32], rstd: f32, dy: &[f32], dweight: &mut [f32]) {
        for ((dw, &x), &g) in dweight.iter_mut().zip(x).zip(dy) {
            *dw = fma::<FMA>(x * rstd, g, *dw);
        }
    }

    /// Turns the pairs (a[i], b[i]) by the angles; `sign` −1 turns back.
    fn turn(a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
        for (((a, b), &cos), &sin) in a.iter_mut().zip(b.iter_mut()).zip(cos).zip(sin) {
            let (x, y, sin) = (*a, *b, sin * sign);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }

    /// out = silu(gate) · up.
    fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp::<FMA>(-gate)) * up;
        }
    }

    /// out = gelu(gate) · up, by the tanh approximation, which is gate · sigmoid(2 · sqrt(2/π) · (gate + 0.044715 · gate³)).
    fn geglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            let cubed = fma::<FMA>(gate * gate * gate, 0.044_715, gate);
            *out = gate / (1.0 + exp::<FMA>(-1.595_769_2 * cubed)) * up;
        }
    }

    /// out = g · sigmoid(alpha · g) · (u + 1), with g and u cut at the limit.
    fn clamped_glu(g: &[f32], u: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
        for ((out, &g), &u) in out.iter_mut().zip(g).zip(u) {
            let (g, u) = (if g > limit { limit } else { g }, u.clamp(-limit, limit));
            *out = g / (1.0 + exp::<FMA>(-alpha * g)) * (u + 1.0);
        }
    }

    /// x = cap · tanh(x / cap).
    fn softcap(x: &mut [f32], cap: f32) {
        for x in x {
            *x = cap - 2.0 * cap / (exp::<FMA>(2.0 * *x / cap) + 1.0);
        }
    }

    /// Turns neighbours (x[2i], x[2i+1]) by the i-th angle.
    fn turn_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
        let (pairs, _) = x.as_chunks_mut::<2>();
        for ((pair, &cos), &sin) in pairs.iter_mut().zip(cos).zip(sin) {
            let ([a, b], sin) = (*pair, sign * sin);
            *pair = [fma::<FMA>(a, cos, -(b * sin)), fma::<FMA>(b, cos, a * sin)];
        }
    }

    /// Replaces gate and up by their gradients.
    fn swiglu_backward(gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
        for ((gate, up), &dout) in gate.iter_mut().zip(up.iter_mut()).zip(dout) {
            let sigmoid = 1.0 / (1.0 + exp::<FMA>(-*gate));
            let silu = *gate * sigmoid;
            let dgate = dout * *up * (sigmoid + silu * (1.0 - sigmoid));
            *up = dout * silu;
            *gate = dgate;
        }
    }

    /// bf16 to f32.
    fn widen(x: &[bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }

    /// Largest element.
    fn max(x: &[f32]) -> f32 {
        largest(x)
    }

    /// x = e^(scale·x − shift); returns the sum.
    fn exp_sum(x: &mut [f32], scale: f32, shift: f32) -> f32 {
        let mut lanes = [0.0_f32; LANES];
        let (chunks, rest) = x.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                chunk[lane] = exp::<FMA>(fma::<FMA>(scale, chunk[lane], -shift));
                lanes[lane] += chunk[lane];
            }
        }
        for (x, lane) in rest.iter_mut().zip(&mut lanes) {
            *x = exp::<FMA>(fma::<FMA>(scale, *x, -shift));
            *lane += *x;
        }
        fold(lanes)
    }

    /// x = e^(scale·x − shift).
    fn exp_shifted(x: &mut [f32], scale: f32, shift: f32) {
        for x in x {
            *x = exp::<FMA>(fma::<FMA>(scale, *x, -shift));
        }
    }

    /// x = a·x.
    fn scale(x: &mut [f32], a: f32) {
        for x in x {
            *x *= a;
        }
    }

    /// dp = p · (dp − delta) · scale: the gradient of a softmax's scores.
    fn softmax_backward(p: &[f32], dp: &mut [f32], delta: f32, scale: f32) {
        for (dp, &p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - delta) * scale;
        }
    }

    /// Turns logits into probabilities in place; returns Σ p·ln p and the place of the largest.
    fn softmax_target(x: &mut [f32]) -> (f32, u32) {
        let top = largest(x);
        let place = x.iter().position(|&x| x == top).unwrap_or(0) as u32;
        let (mut sums, mut weighted) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for chunk in x.chunks_mut(LANES) {
            if chunk.len() == LANES {
                for lane in 0..LANES {
                    let shifted = chunk[lane] - top;
                    let e = exp::<FMA>(shifted);
                    sums[lane] += e;
                    weighted[lane] = fma::<FMA>(e, shifted, weighted[lane]);
                    chunk[lane] = e;
                }
            } else {
                for (lane, x) in chunk.iter_mut().enumerate() {
                    let shifted = *x - top;
                    let e = exp::<FMA>(shifted);
                    sums[lane] += e;
                    weighted[lane] = fma::<FMA>(e, shifted, weighted[lane]);
                    *x = e;
                }
            }
        }
        let sum = fold(sums);
        let inverse = 1.0 / sum;
        for x in x.iter_mut() {
            *x *= inverse;
        }
        (fold(weighted) * inverse - sum.ln(), place)
    }

    /// KL(p‖softmax(x)) given Σ p·ln p; x becomes coefficient · (softmax(x) − p). Returns the loss and the top place.
    fn kl_divergence(x: &mut [f32], p: &[f32], negative_entropy: f32, coefficient: f32) -> (f32, u32) {
        let top = largest(x);
        let place = x.iter().position(|&x| x == top).unwrap_or(0) as u32;
        let (mut sums, mut cross) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for (x, p) in x.chunks_mut(LANES).zip(p.chunks(LANES)) {
            if x.len() == LANES && p.len() == LANES {
                for lane in 0..LANES {
                    let shifted = x[lane] - top;
                    cross[lane] = fma::<FMA>(p[lane], shifted, cross[lane]);
                    x[lane] = exp::<FMA>(shifted);
                    sums[lane] += x[lane];
                }
            } else {
                for (lane, (x, &p)) in x.iter_mut().zip(p).enumerate() {
                    let shifted = *x - top;
                    cross[lane] = fma::<FMA>(p, shifted, cross[lane]);
                    *x = exp::<FMA>(shifted);
                    sums[lane] += *x;
                }
            }
        }
        let sum = fold(sums);
        let inverse = 1.0 / sum;
        for (x, &p) in x.iter_mut().zip(p) {
            *x = coefficient * (*x * inverse - p);
        }
        (negative_entropy - fold(cross) + sum.ln(), place)
    }

    /// Independent chains of multiply-adds, as many as hide the latency of one and fit into 16 registers of 8; their number.
    fn chains_of_multiply_adds(rounds: usize) -> (usize, f32) {
        const CHAINS: usize = 3;
        let mut sums = [[0.5_f32; LANES]; CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                for lane in sum.iter_mut() {
                    *lane = fma::<FMA>(*lane, 0.999, 0.001);
                }
            }
        }
        (CHAINS, sums.iter().flatten().sum())
    }

    /// Place of the largest element.
    fn argmax(x: &[f32]) -> u32 {
        let top = largest(x);
        x.iter().position(|&x| x == top).unwrap_or(0) as u32
    }

    /// What elements from place `first` on add to a checksum.
    fn checksum(first: u32, x: &[f32]) -> u64 {
        checksum_from(first, x)
    }

    /// Σ x² in f64.
    fn sum_of_squares(x: &[f32]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                lanes[lane] += f64::from(chunk[lane]) * f64::from(chunk[lane]);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(x) * f64::from(x);
        }
        lanes.iter().sum()
    }

    /// One AdamW update.
    fn adamw(update: &AdamWUpdate, parameters: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32]) {
        let (beta1, beta2) = (update.beta1, update.beta2);
        let correction1 = 1.0 - beta1.powf(update.number as f64);
        let correction2 = 1.0 - beta2.powf(update.number as f64);
        let keep = (1.0 - update.learning_rate * update.weight_decay) as f32;
        let (beta2_f32, new1, new2) = (beta2 as f32, (1.0 - beta1) as f32, (1.0 - beta2) as f32);
        let step = (update.learning_rate / correction1) as f32;
        let root2 = correction2.sqrt() as f32;
        let (epsilon, scale) = (update.epsilon as f32, update.gradient_scale);
        for (((p, m), v), &g) in parameters.iter_mut().zip(m.iter_mut()).zip(v.iter_mut()).zip(gradient) {
            let g = g * scale;
            *m = fma::<FMA>(new1, g - *m, *m);
            *v = fma::<FMA>(new2 * g, g, *v * beta2_f32);
            *p = *p * keep - step * (*m / (v.sqrt() / root2 + epsilon));
        }
    }
}

/// Multiply-adds on registers: how many operations that were, two each, and a value that depends on all of them.
pub(crate) fn multiply_add_rounds(rounds: usize) -> (f64, f32) {
    let (chains, value) = chains_of_multiply_adds(rounds);
    (2.0 * (rounds * chains * LANES) as f64, value)
}

/// bf16 to f32; as long as the shorter of the two.
pub(crate) fn widen_bf16(x: &[bf16], y: &mut [f32]) {
    widen(x, y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut worst = 0.0_f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            for ours in [exp::<true>(x), exp::<false>(x)] {
                worst = worst.max((f64::from(ours) - exact).abs() / exact);
            }
        }
        assert!(worst < 2e-7, "relative error {worst:e}");
        assert_eq!(exp::<true>(0.0), 1.0);
        assert!(exp::<true>(-1e30) < 1e-37);
    }

    #[test]
    fn the_vectorised_and_the_plain_reduction_agree() {
        for n in [0, 1, 31, 32, 33, 100, 1000] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let y: Vec<f32> = (0..n).map(|i| (i as f32 * 0.3).cos()).collect();
            let exact: f64 = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
            assert!((f64::from(dot(&x, &y)) - exact).abs() < 1e-4, "length {n}");
            let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((sum_of_squares(&x) - squares).abs() < 1e-9, "length {n}");
        }
    }

    #[test]
    fn the_first_of_equal_maxima_wins() {
        let mut x = vec![0.0_f32; 70];
        (x[40], x[66]) = (3.0, 3.0);
        assert_eq!(argmax(&x), 40);
    }
}
