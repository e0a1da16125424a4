//! What goes wrong on a device, and what is said then.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use eaglet_runtime::cuda::{
    Buffer, Cuda, CudaError, Event, GpuSurvey, KernelCache, Kernels, Nvrtc, Origin, Precision, Program,
};
use eaglet_runtime::device::{self, Device};

use crate::stack::{self, Stack};

/// A stack of stand-ins; faults are not for a GPU.
fn stand_in() -> Option<Stack> {
    Stack::open().filter(|stack| !stack.is_real())
}

#[test]
fn want_of_room_says_how_much_there_is() {
    let Some(stack) = stand_in() else { return };
    let error = Buffer::<f32>::new(&stack.context, 1 << 40).expect_err("too much");
    let text = error.to_string();
    assert!(matches!(error, CudaError::OutOfMemory { .. }), "{text}");
    assert!(
        text.starts_with("no room for 4398046511104 bytes of a buffer on cuda:0"),
        "{text}"
    );
}

/// MEMORY-1
#[test]
fn want_of_room_says_who_holds_what() {
    let Some(_) = stand_in() else { return };
    let search = stack::search().expect("the stack is there");
    let folder = tempfile::tempdir().expect("a folder");
    let cache = KernelCache::at(folder.path());
    let device = Cuda::new(&search, 0, cache, Precision::F32).expect("a device");
    let [mut states, mut logits, mut more] = [(); 3].map(|()| device::Buffer::default());
    device.fit(&mut states, "hidden states", 1000);
    device.fit(&mut logits, "logits", 3000);
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| device.fit(&mut more, "gradients", 1 << 40)))
        .expect_err("too much");
    let text = panic.downcast_ref::<CudaError>().expect("an error").to_string();
    assert!(
        text.starts_with("no room for 4398046511104 bytes of gradients on cuda:0")
            && text.ends_with("this rank holds 12000 for logits, 4000 for hidden states"),
        "{text}"
    );
    // What is given back is not held any more, and a buffer that shrinks keeps its memory.
    drop(logits);
    device.fit(&mut states, "hidden states", 10);
    assert_eq!(states.len(), 10);
    device.fit(&mut more, "gradients", 500);
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| device.fit(&mut more, "gradients", 1 << 40)))
        .expect_err("too much");
    let text = panic.downcast_ref::<CudaError>().expect("an error").to_string();
    assert!(text.ends_with("this rank holds 4000 for hidden states"), "{text}");
}

/// CACHE-1
#[test]
fn kernels_are_compiled_once_and_again_when_a_file_is_damaged() {
    let Some(_) = stand_in() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let search = stack::search().expect("the stack is there");
    let origin = || {
        let nvrtc = Nvrtc::open(&search).expect("a compiler");
        let source_text = Program::Norm.text();
        let options = Program::Norm.options();
        let source = eaglet_runtime::cuda::Source {
            program: "norm",
            text: &source_text,
            options: &options,
            architecture: "sm_90",
        };
        let (code, origin) = KernelCache::at(folder.path())
            .code(&nvrtc, &source)
            .expect("compiled");
        assert!(code.starts_with(b"\x7fELF"));
        origin
    };
    assert_eq!(origin(), Origin::Compiler);
    assert_eq!(origin(), Origin::Cache);
    let file = std::fs::read_dir(folder.path())
        .expect("listed")
        .next()
        .expect("one file")
        .expect("an entry")
        .path();
    let whole = std::fs::read(&file).expect("bytes");
    std::fs::write(&file, &whole[..whole.len() / 2]).expect("written");
    assert_eq!(origin(), Origin::Compiler);
    assert_eq!(std::fs::read(&file).expect("bytes").len(), whole.len());
    assert_eq!(origin(), Origin::Cache);
}

#[test]
fn a_program_that_does_not_compile_shows_the_compilers_words() {
    let Some(_) = stand_in() else { return };
    let nvrtc = Nvrtc::open(&stack::search().expect("the stack is there")).expect("a compiler");
    let error = nvrtc
        .compile("broken", "__global__ void broken() { nonsense; }", "sm_90", &[])
        .expect_err("nonsense");
    let text = error.to_string();
    assert!(
        text.contains("kernels `broken` do not compile for sm_90") && text.contains("nonsense"),
        "{text}"
    );
}

#[test]
fn kernels_are_compiled_for_the_newest_architecture_that_the_device_runs() {
    let Some(_) = stand_in() else { return };
    let nvrtc = Nvrtc::open(&stack::search().expect("the stack is there")).expect("a compiler");
    // The stand-in knows 8.0, 8.6 and 9.0.
    for (capability, architecture) in [((8, 0), "sm_80"), ((8, 9), "sm_86"), ((9, 0), "sm_90")] {
        assert_eq!(nvrtc.architecture(capability).expect("known"), architecture);
    }
    for unknown in [(7, 5), (12, 0)] {
        let error = nvrtc.architecture(unknown).expect_err("another generation");
        assert!(
            error
                .to_string()
                .contains("install the NVRTC of another CUDA version"),
            "{error}"
        );
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let Some(stack) = stand_in() else { return };
    let driver = eaglet_runtime::cuda::Driver::open(&stack::search().expect("the stack is there"));
    let error = driver.expect("open").device(3).expect_err("there is one");
    assert!(
        error
            .to_string()
            .starts_with("there is no cuda:3: the driver has one device, cuda:0"),
        "{error}"
    );
    drop(stack);
}

/// Runs `fault_child` with a fault.
fn with_fault(fault: &str) -> Option<String> {
    stand_in()?;
    Some(stack::child(
        "faults::fault_child",
        &[("EAGLET_STANDIN_FAULT", fault)],
    ))
}

/// Allocates, launches and waits; prints how each ended.
#[test]
fn fault_child() {
    if !stack::is_child() {
        return;
    }
    let Some(stack) = Stack::open() else { return };
    let mut buffer = match Buffer::<f32>::new(&stack.context, 100) {
        Ok(buffer) => buffer,
        Err(error) => return println!("allocation: {error}"),
    };
    let launched = stack.kernels.scale(&stack.stream, buffer.view_mut(), 2.0);
    println!("launch: {launched:?}");
    let event = Event::new(&stack.context);
    if let Ok(event) = &event {
        let _ = stack.stream.record(event);
        // A hang shows as work that is never done, and nobody may wait for it without a deadline.
        for _ in 0..20 {
            match event.is_done() {
                Ok(true) => break,
                Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return println!("query: {error}"),
            }
        }
        println!("done: {:?}", event.is_done().ok());
    }
    if event.is_ok_and(|event| event.is_done().is_ok_and(|done| !done)) {
        // Its memory cannot be given back while it runs, as on a GPU.
        std::process::exit(0);
    }
    println!(
        "synchronised: {:?}",
        stack.stream.synchronize().map_err(|error| error.to_string())
    );
}

#[test]
fn a_failed_allocation_is_want_of_room() {
    let Some(text) = with_fault("alloc:1") else { return };
    assert!(
        text.contains("allocation: no room for 400 bytes of a buffer on cuda:0"),
        "{text}"
    );
}

#[test]
fn a_failed_kernel_shows_when_somebody_waits() {
    let Some(text) = with_fault("launch:1") else {
        return;
    };
    assert!(text.contains("launch: Ok(())"), "{text}");
    assert!(text.contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{text}");
}

#[test]
fn a_hung_kernel_is_never_done() {
    let Some(text) = with_fault("hang:1") else { return };
    assert!(text.contains("done: Some(false)"), "{text}");
}

#[test]
fn without_a_fault_everything_ends_well() {
    let Some(text) = with_fault("") else { return };
    assert!(
        text.contains("done: Some(true)") && text.contains("synchronised: Ok(())"),
        "{text}"
    );
}

#[test]
fn costs_and_origins_are_known() {
    let Some(stack) = Stack::open() else { return };
    let origins = stack.kernels.origins();
    assert!(
        origins.iter().any(|(program, _)| program == "attention-136-136"),
        "{origins:?}"
    );
    let cost = stack
        .kernels
        .function(Program::Norm, "rms_norm")
        .and_then(|function| function.cost())
        .expect("known");
    assert!(cost.registers > 0);
    let error = stack
        .kernels
        .function(Program::Norm, "no_such_kernel")
        .expect_err("unknown");
    assert!(
        error.to_string().contains("cuModuleGetFunction failed"),
        "{error}"
    );
    assert_eq!(Kernels::sum_parts(0), 1);
}

#[test]
fn a_machine_with_two_devices_is_surveyed() {
    if stand_in().is_some() {
        let variables = [
            ("EAGLET_STANDIN_DEVICES", "2"),
            ("EAGLET_STANDIN_CAPABILITY", "8.6"),
        ];
        let text = stack::child("faults::survey_child", &variables);
        assert!(text.contains("surveyed"), "{text}");
    }
}

/// The child of the test above.
#[test]
fn survey_child() {
    if !stack::is_child() {
        return;
    }
    let Some(search) = stack::search() else { return };
    let survey = GpuSurvey::here(&search);
    assert_eq!(survey.problems, Vec::<String>::new());
    assert_eq!(
        (survey.driver_cuda.as_deref(), survey.nccl.as_deref()),
        (Some("13.2"), Some("2.27.0"))
    );
    assert_eq!(survey.libraries.len(), 4);
    let [first, second] = survey.gpus.as_slice() else {
        panic!("{survey:?}")
    };
    assert_eq!(
        (
            first.device.as_str(),
            second.name.as_str(),
            second.capability.as_str()
        ),
        ("cuda:0", "stand-in GPU 1", "8.6")
    );
    assert_eq!(survey.peer_access, [[true, true], [true, true]]);
    println!("surveyed");
}

/// ARENA-2
#[test]
fn what_is_given_back_is_taken_again_and_the_device_is_asked_once() {
    let Some(_) = stand_in() else { return };
    let search = stack::search().expect("the stack is there");
    let folder = tempfile::tempdir().expect("a folder");
    let cache = KernelCache::at(folder.path());
    let device = Cuda::new(&search, 0, cache, Precision::F32).expect("a device");
    let arena = || device.arena().expect("it says").expect("the stand-in has pools");
    let before = arena();
    let [mut one, mut other] = [(); 2].map(|()| device::Buffer::default());
    device.fit(&mut one, "states", 1 << 20);
    let full = arena();
    assert_eq!(full.used - before.used, 4 << 20);
    assert!(full.reserved >= full.used);
    // Another size, of memory that is there.
    drop(one);
    device.fit(&mut other, "gradients", 900_000);
    let after = arena();
    assert_eq!(after.used - before.used, 3_600_000);
    assert_eq!((after.reserved, after.most_used), (full.reserved, full.most_used));
}
