//! GPUs of NVIDIA's: libraries found at run time, kernels compiled at start, memory, streams.
//!
//! Nothing of CUDA is needed to build this crate or to start the binary. The layers, from below: [`Library`] finds and
//! opens a shared object; [`Driver`], [`Gpu`] and [`Context`] are the driver's; [`Buffer`], [`Stream`], [`Module`] own
//! what they name; [`Nvrtc`] and [`KernelCache`] make machine code of the texts in `kernels/`; [`Kernels`] launches it,
//! one function per operation, with the shapes checked; [`Blas`] multiplies; [`Communicator`] sums over
//! ranks: [`GradientSums`] gradients while they are computed, and [`SliceSums`] what slices of a verifier come to.
//!
//! Invariants of all kernels are those of [`crate::device`]: sums in an order that depends on shapes only, and rows that
//! do not depend on the rows beside them.

mod arena;
mod arrivals;
mod blas;
mod cache;
mod device;
mod driver;
mod kernels;
mod landing;
mod library;
mod matrix;
mod meeting;
mod memory;
mod module;
mod nccl;
mod nvrtc;
mod operands;
mod programs;
mod slices;
mod staging;
mod stream;
mod sums;
mod survey;
mod turns;
mod upload;
mod weights;

pub use arena::ArenaUse;
pub use arrivals::Arrival;
pub use blas::{Blas, Element, Factor, ProductKind};
pub use cache::{CACHE_VARIABLE, KernelCache, Origin, Source};
pub use device::{Cuda, Precision};
pub use driver::{Context, CudaError, Driver, Gpu};
pub use kernels::{AttentionOperands, AttentionTables, DeviceForm, Kernels, RowChoice, Scales, ScatterList};
pub use landing::InFlight;
pub use library::{Library, LibraryError, LibraryKind, PATH_VARIABLE, SearchPath};
pub use matrix::{Indices, MatrixView, MatrixViewMut};
pub use meeting::MeetingAborter;
pub use memory::{Buffer, Holders, Pinned, View, ViewMut};
pub use module::{Function, FunctionCost, Module};
pub use nccl::{Collectable, Communicator, Nccl, NcclError, Pending, UniqueId};
pub use nvrtc::Nvrtc;
pub use programs::Program;
pub use slices::{SliceShape, SliceSums};
pub use stream::{Event, Stream};
pub use sums::{Gradient, GradientSums, Handover, SumDevice, SumError, SumShape, SumWord};
pub use survey::{GpuFacts, GpuSurvey};
pub use weights::GpuMatrix;
pub(crate) use weights::UNPACKED_BYTES;
