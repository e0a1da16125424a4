//! What a bench computes on, and what that could do at best.

use std::str::FromStr;

use anyhow::Result;
use eaglet_runtime::cuda::{Cuda, KernelCache, Precision, SearchPath};
use eaglet_runtime::device::{Cpu, Device, ProductKernel, Products};
use serde::Serialize;

use super::facts::{Dtype, Limits};

/// `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Cpu,
    Cuda(usize),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("cuda:").map(str::parse);
        match (text, number) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(Ok(number))) => Ok(Self::Cuda(number)),
            _ => Err("it is cpu, or cuda:N as `eaglet devices` lists them".to_owned()),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Serialize for Place {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A device of a bench.
pub(super) trait Measured: Device + Sized {
    /// What products go through.
    fn kernel(&self) -> String;

    /// Best rates, measured now.
    ///
    /// # Errors
    /// If threads cannot be started.
    fn limits(&self) -> Result<Limits>;

    /// Bytes of a memory of its own that are held.
    fn held_bytes(&self) -> Option<u64>;
}

impl Measured for Cpu {
    fn kernel(&self) -> String {
        match Self::kernel(self) {
            ProductKernel::F32 => "gemm-f32".to_owned(),
            ProductKernel::AmxBf16 => "amx-bf16".to_owned(),
        }
    }

    fn limits(&self) -> Result<Limits> {
        Limits::of_cpu(self.threads())
    }

    fn held_bytes(&self) -> Option<u64> {
        None
    }
}

impl Measured for Cuda {
    fn kernel(&self) -> String {
        match self.products() {
            Products::F32 => "cublaslt-f32".to_owned(),
            Products::Bf16 => "cublaslt-bf16".to_owned(),
        }
    }

    fn limits(&self) -> Result<Limits> {
        Ok(Limits::of_device(self, self.name()?))
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.holders().0.iter().map(|(_, bytes)| *bytes as u64).sum())
    }
}

/// A CPU of some threads.
///
/// # Errors
/// If the threads cannot be started.
pub(super) fn cpu(dtype: Dtype, threads: usize) -> Result<Cpu> {
    let products = match dtype {
        Dtype::F32 => Products::F32,
        Dtype::Bf16 => Products::Bf16,
    };
    Ok(Cpu::with_products(threads, products)?)
}

/// A GPU.
///
/// # Errors
/// If a library or the device is missing.
pub(super) fn cuda(dtype: Dtype, number: usize) -> Result<Cuda> {
    let precision = match dtype {
        Dtype::F32 => Precision::F32,
        Dtype::Bf16 => Precision::Bf16,
    };
    Ok(Cuda::new(
        &SearchPath::here(),
        number,
        KernelCache::here(),
        precision,
    )?)
}

#[cfg(test)]
mod tests {
    use super::Place;

    #[test]
    fn places_are_read_and_refused() {
        for (text, place) in [
            ("cpu", Place::Cpu),
            ("cuda:0", Place::Cuda(0)),
            ("cuda:13", Place::Cuda(13)),
        ] {
            assert_eq!(text.parse(), Ok(place));
            assert_eq!(place.to_string(), text);
        }
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}
