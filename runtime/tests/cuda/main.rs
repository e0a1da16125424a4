//! The CUDA path on a machine without a GPU: libraries of ours stand in for NVIDIA's, and run the very text of the
//! kernels on the CPU. With `EAGLET_TEST_GPU=1` the same tests use the machine's own libraries and GPU.
//!
//! Skipped, with a line that says so, where there is no `g++` to build the stand-ins.
#![allow(clippy::print_stdout, reason = "children tell their parents what they saw")]

mod attention;
mod cases;
mod communicators;
mod compiler;
mod elementwise;
mod faults;
mod products;
mod rows;
mod slices;
mod stack;
mod sums;
mod whole;

use cases::Cases;
use stack::Stack;

/// Every kernel against the CPU backend, on the same inputs.
fn all_cases(stack: &Stack) -> Cases<'_> {
    let mut cases = Cases::new(stack);
    elementwise::all(&mut cases);
    rows::all(&mut cases);
    attention::all(&mut cases);
    cases
}

#[test]
fn every_kernel_matches_the_cpu() {
    let Some(stack) = Stack::open() else { return };
    let cases = all_cases(&stack);
    cases.print();
    cases.check();
}

/// Threads run one at a time in the stand-in, from the first to the last or from the last to the first: a barrier that
/// was forgotten, or a sum whose order depends on the threads' order, gives other bits.
#[test]
fn bits_do_not_depend_on_the_order_of_threads() {
    let Some(stack) = Stack::open() else { return };
    if stack.is_real() {
        return;
    }
    let reversed = stack::child("bits_in_reverse_order", &[("EAGLET_STANDIN_REVERSE", "1")]);
    let theirs: Vec<&str> = reversed
        .lines()
        .filter(|line| line.starts_with("bits "))
        .collect();
    let ours = all_cases(&stack).digests();
    assert!(ours.len() > 50, "{} cases", ours.len());
    assert_eq!(ours.len(), theirs.len(), "cases here and there");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(ours, theirs);
    }
}

/// The child of the test above.
#[test]
fn bits_in_reverse_order() {
    if !stack::is_child() {
        return;
    }
    let Some(stack) = Stack::open() else { return };
    println!();
    for line in all_cases(&stack).digests() {
        println!("{line}");
    }
}
