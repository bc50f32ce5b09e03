//! The README's example, as a user's crate has it.

use memfit::tch::{Device, Kind, Tensor};

fn main() {
    let sum = Tensor::ones([3], (Kind::Float, Device::Cpu)).sum(Kind::Float);
    assert_eq!(sum.double_value(&[]), 3.0);
    println!("a crate elsewhere trains with memfit");
}
