//! `eaglet bench`: measurements that anybody can repeat on their own machine.

mod facts;
mod interrupt;
mod recovery;
mod run;

pub(crate) use recovery::recovery;
