#![allow(clippy::print_stdout, missing_docs)]
use std::time::Instant;
use std::hint::black_box;
fn main() {
    let src = vec![7u8; 64 << 20];
    let mut dst = vec![1u8; 64 << 20];
    for mib in [1usize, 16, 64] {
        let n = mib << 20;
        let rounds = 1024 / mib;
        let t = |name: &str, f: &mut dyn FnMut()| {
            let mut best = 0f64;
            for _ in 0..3 { let s = Instant::now(); for _ in 0..rounds { f(); }
            best = best.max((n * rounds) as f64 / s.elapsed().as_secs_f64() / 1e9);}
            println!("{mib} {name} {best:.1}");
        };
        t("memcpy", &mut || { dst[..n].copy_from_slice(black_box(&src[..n])); black_box(&dst); });
        t("crc32c", &mut || { black_box(crc32c::crc32c(black_box(&src[..n]))); });
        t("xxh3_64", &mut || { black_box(xxhash_rust::xxh3::xxh3_64(black_box(&src[..n]))); });
        t("xxh3 stream 32k", &mut || { let mut h = xxhash_rust::xxh3::Xxh3::new(); for c in src[..n].chunks(32768) { h.update(black_box(c)); } black_box(h.digest()); });
        t("memcpy+crc32c 32k", &mut || { let mut h = 0; for (c, d) in src[..n].chunks(32768).zip(dst[..n].chunks_mut(32768)) { h = crc32c::crc32c_append(h, black_box(c)); d.copy_from_slice(c); } black_box((h, &dst)); });
        t("memcpy+xxh3 32k", &mut || { let mut h = xxhash_rust::xxh3::Xxh3::new(); for (c, d) in src[..n].chunks(32768).zip(dst[..n].chunks_mut(32768)) { h.update(black_box(c)); d.copy_from_slice(c); } black_box((h.digest(), &dst)); });
    }
}
