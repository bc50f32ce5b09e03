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

/// Refusals of host memory: libtorch's CPU allocator, C++ itself, mapped files, pinned memory,
/// what accelerators' libraries keep on the host.
fn cpu(text: &str) -> Option<Report> {
    const HOST: [&str; 7] = [
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "std::bad_alloc",
        "unable to mmap memory: you tried to mmap",
        "oneMKL DFTI ERROR: Not enough memory",
        "MKL error: SPARSE_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    ];
    if !HOST.iter().any(|sign| text.contains(sign)) && !unmapped(text) && !pinned(text) {
        return None;
    }
    let requested = after(text, "you tried to allocate ").or_else(|| after(text, "unable to mmap "));
    Some((requested.and_then(digits), None, None, Device::Cpu))
}

/// A file that was not mapped, for want of memory and no other reason.
fn unmapped(text: &str) -> bool {
    let rest = after(text, "unable to mmap ").and_then(|rest| after(rest, " bytes from file <"));
    rest.and_then(|rest| rest.lines().next()).is_some_and(|line| line.trim_end().ends_with("(12)"))
}

/// The driver's refusal of page-locked memory, which only the place it was raised at tells from
/// one of the device's.
fn pinned(text: &str) -> bool {
    const PLACES: [&str; 3] = ["CachingHostAllocator", "PinnedMemoryAllocator", "cudaHostRegister"];
    text.contains("error: out of memory") && PLACES.iter().any(|place| text.contains(place))
}

/// A caching device allocator's.
fn accelerator(text: &str) -> Option<Report> {
    const SIGNS: [&str; 3] = ["CUDA out of memory", "HIP out of memory", "XPU out of memory"];
    let mps = text.contains("MPS backend out of memory");
    if !mps && !SIGNS.iter().any(|sign| text.contains(sign)) {
        return asynchronous(text);
    }
    let requested = after(text, "Tried to allocate ")
        .or_else(|| after(text, "tried to allocate "))
        .or_else(|| after(text, "Requested size: "));
    let live = after(text, "Of the allocated memory ").or_else(|| after(text, "MPS allocated: "));
    let limit = allowed(text).or_else(|| after(text, "max allowed: "));
    let index = after(text, "GPU ").and_then(digits).unwrap_or_default() as usize;
    let device = if mps { Device::Mps } else { Device::Cuda(index) };
    Some((requested.and_then(size), live.and_then(size), limit.and_then(size), device))
}

/// That of `cudaMallocAsync`: a table.
fn asynchronous(text: &str) -> Option<Report> {
    let (_, rest) = text.split_once("Allocation on device ")?;
    let (index, rest) = rest.split_once(" would exceed allowed memory")?;
    let row = |name| after(rest, name).and_then(|row| after(row, ":")).and_then(size);
    let device = Device::Cuda(digits(index)? as usize);
    Some((row("Requested"), row("Currently allocated"), row("PyTorch limit"), device))
}

/// The share of the device that the process may have: `… 8.00 GiB allowed; …`.
fn allowed(text: &str) -> Option<&str> {
    let (before, _) = text.split_once(" allowed; ")?;
    let unit = before.rfind(' ')?;
    let number = before[..unit].rfind(' ').map_or(0, |space| space + 1);
    Some(&before[number..])
}

/// Failures below the caching allocators: the driver and its libraries. They name no device; the
/// first one stands for it.
fn driver(text: &str) -> Option<Report> {
    const SIGNS: [&str; 9] = [
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "HIP error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUSOLVER_STATUS_ALLOC_FAILED",
        "CUSPARSE_STATUS_ALLOC_FAILED",
        "CUFFT_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
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
    }

    #[test]
    fn every_refusal_is_recognised_and_says_whose_memory_it_was() {
        let (host, first) = (Device::Cpu, Device::Cuda(0));
        let pinned = "CUDA error: out of memory\nException raised from allocate_host_memory at \
                      aten/src/ATen/cuda/CachingHostAllocator.cpp:120";
        let cases = [
            ("std::bad_alloc", None, host),
            ("[json] bad news: std::bad_alloc\nat line 3", None, host),
            (
                "alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory: you tried to allocate 96 bytes.",
                Some(96),
                host,
            ),
            (
                "unable to mmap 4096 bytes from file </tmp/weights (1)>: Cannot allocate memory (12)",
                Some(4096),
                host,
            ),
            ("$ Torch: unable to mmap memory: you tried to mmap 3 GB.", None, host),
            ("MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate", None, host),
            ("MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_sparse_s_mm`", None, host),
            ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", None, host),
            (pinned, None, host),
            ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", None, first),
            ("CUDA driver error: out of memory", None, first),
            ("HIP error: out of memory", None, first),
            ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None, first),
            ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`", None, first),
            ("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling", None, first),
            ("cuFFT error: CUFFT_ALLOC_FAILED", None, first),
            ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None, first),
            ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", None, first),
            ("HIP out of memory. Tried to allocate 2.00 MiB. GPU 1 has a", Some(2 << 20), Device::Cuda(1)),
            ("XPU out of memory. Tried to allocate 3.00 KiB. GPU 0 has a", Some(3072), first),
            (
                "CUDA out of memory. Allocation was preemptively rejected because of a limit. Requested size: \
                 1.50 GiB. GPU 2",
                Some(3 << 29),
                Device::Cuda(2),
            ),
        ];
        for (text, requested, device) in cases {
            assert_eq!(read(text), Some((requested, None, None, device)), "{text}");
        }
        let table = "Allocation on device 3 would exceed allowed memory. (out of memory)\n\
                     Currently allocated     : 1.00 GiB\nRequested               : 512.00 MiB\n\
                     Device limit            : 79.15 GiB\nFree (according to CUDA): 20.00 MiB\n\
                     PyTorch limit (set by user-supplied memory fraction)\n                        : 2.00 GiB";
        assert_eq!(read(table), Some((Some(512 << 20), Some(1 << 30), Some(2 << 30), Device::Cuda(3))));
    }

    #[test]
    fn other_failures_are_not_about_memory() {
        for text in [
            "",
            "mat1 and mat2 shapes cannot be multiplied",
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "cuFFT error: CUFFT_INTERNAL_ERROR",
            "std::bad_function_call",
            "unable to mmap 4096 bytes from file </tmp/weights (12)>: Invalid argument (22)",
            "unable to open file </tmp/weights> in read-only mode: No such file or directory (2)",
            "the reader ran out of memory cards",
            "error: out of memory",
            "Allocation on device 3 failed",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
