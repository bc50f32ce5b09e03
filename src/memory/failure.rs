//! libtorch's texts about memory, made into one typed error.

use tch::Device;

use super::bytes::parse_bytes;
use crate::error::Error;

/// The typed error behind a text about memory, if it is one.
pub(crate) fn out_of_memory(text: &str) -> Option<Error> {
    let (requested, live, limit, device) =
        counted(text).or_else(|| cpu(text)).or_else(|| accelerator(text)).or_else(|| driver(text))?;
    Some(Error::OutOfMemory { requested, live, limit, device })
}

type Report = (Option<u64>, Option<u64>, Option<u64>, Device);

/// The counting allocator's.
fn counted(text: &str) -> Option<Report> {
    let (_, report) = text.split_once("memfit: out of memory: ")?;
    let number = |name| after(report, name).and_then(digits);
    Some((number("requested="), number("live="), number("limit="), Device::Cpu))
}

/// The system's refusals on the host: libtorch's CPU allocator, pinned memory, C++ itself.
fn cpu(text: &str) -> Option<Report> {
    const HOST: [&str; 3] = [
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "std::bad_alloc",
    ];
    if !HOST.iter().any(|sign| text.contains(sign)) {
        return None;
    }
    let requested = after(text, "you tried to allocate ").and_then(digits);
    Some((requested, None, None, Device::Cpu))
}

/// A caching device allocator's.
fn accelerator(text: &str) -> Option<Report> {
    let cuda = text.contains("CUDA out of memory") || text.contains("HIP out of memory");
    let mps = text.contains("MPS backend out of memory");
    if !cuda && !mps {
        return None;
    }
    let requested = after(text, "Tried to allocate ").or_else(|| after(text, "tried to allocate "));
    let live = after(text, "Of the allocated memory ").or_else(|| after(text, "MPS allocated: "));
    let limit = allowed(text).or_else(|| after(text, "max allowed: "));
    let index = after(text, "GPU ").and_then(digits).unwrap_or_default() as usize;
    let device = if mps { Device::Mps } else { Device::Cuda(index) };
    Some((requested.and_then(size), live.and_then(size), limit.and_then(size), device))
}

/// The share of the device that the process may have: `… 8.00 GiB allowed; …`.
fn allowed(text: &str) -> Option<&str> {
    let (before, _) = text.split_once(" allowed; ")?;
    let unit = before.rfind(' ')?;
    let number = before[..unit].rfind(' ').map_or(0, |space| space + 1);
    Some(&before[number..])
}

/// Failures below the caching allocators: the driver, pinned host memory, cuBLAS, cuDNN.
fn driver(text: &str) -> Option<Report> {
    const SIGNS: [&str; 4] = [
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ];
    SIGNS.iter().any(|sign| text.contains(sign)).then_some((None, None, None, Device::Cuda(0)))
}

fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

fn digits(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// A size as libtorch writes it: `2.00 GiB`, `512 bytes`, `20.00 MB`.
fn size(text: &str) -> Option<u64> {
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?;
    let unit: String = words.next()?.chars().take_while(char::is_ascii_alphabetic).collect();
    parse_bytes(&format!("{number} {unit}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Report> {
        match out_of_memory(text)? {
            Error::OutOfMemory { requested, live, limit, device } => Some((requested, live, limit, device)),
            _ => None,
        }
    }

    /// Case 54.
    #[test]
    fn texts_of_every_allocator_give_their_numbers() {
        let cpu = Device::Cpu;
        let ours = "memfit: out of memory: requested=40 live=70 limit=100 device=cpu";
        assert_eq!(read(ours), Some((Some(40), Some(70), Some(100), cpu)));
        let system = "memfit: out of memory: requested=40 live=70 limit=none device=cpu\nmore";
        assert_eq!(read(system), Some((Some(40), Some(70), None, cpu)));
        let plain = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: \
                     you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)";
        assert_eq!(read(plain), Some((Some(4 << 40), None, None, cpu)));
        let cuda = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of \
                    which 1.44 GiB is free. Process 7 has 77.70 GiB memory in use. 40.00 GiB allowed; Of the \
                    allocated memory 1.50 GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but \
                    unallocated.";
        assert_eq!(read(cuda), Some((Some(2 << 30), Some(3 << 29), Some(40 << 30), Device::Cuda(1))));
        let small = "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has";
        assert_eq!(read(small), Some((Some(512), None, None, Device::Cuda(0))));
        let mps = "MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 1.00 MB, max allowed: \
                   9.07 GB). Tried to allocate 256 bytes on shared pool.";
        assert_eq!(read(mps), Some((Some(256), Some(6_000_000_000), Some(9_070_000_000), Device::Mps)));
        assert_eq!(
            read("CUDA error: out of memory\nCUDA kernel errors"),
            Some((None, None, None, Device::Cuda(0)))
        );
        assert_eq!(read("mat1 and mat2 shapes cannot be multiplied"), None);
    }
}
