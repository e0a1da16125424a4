//! Sums over the draft replicas, taken in seat order so that they repeat bit for bit.
