//! Files that hold what memory does not: temporary, reserved, advised.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file without a name in `folder`: nothing stays behind, whatever ends the process.
pub(crate) fn temporary(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    #[cfg(target_os = "linux")]
    match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
        Err(error) if nameless_unknown(&error) => {}
        opened => return opened,
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".memfit-{}-{number}", std::process::id()));
        match options.clone().create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                let file = opened?;
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
}

/// Whether the file system, or the kernel, has no files without a name.
#[cfg(target_os = "linux")]
fn nameless_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL | libc::ENOENT))
}

/// Reserves room on the disk, so that writing there cannot find it full. Where the file
/// system cannot reserve, only the length is set.
pub(crate) fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    if length == 0 {
        return Ok(());
    }
    #[cfg(target_os = "linux")]
    loop {
        // SAFETY: the descriptor is open while `file` is borrowed; no memory is passed.
        let done =
            unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as libc::off_t, length as libc::off_t) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => break,
            _ => return Err(error),
        }
    }
    let end = offset + length;
    if file.metadata()?.len() < end { file.set_len(end) } else { Ok(()) }
}

/// Tells the kernel that a part is read soon, so that it may start now.
pub(crate) fn will_need(file: &File, offset: u64, length: u64) {
    #[cfg(target_os = "linux")]
    advise(file, offset, length, libc::POSIX_FADV_WILLNEED);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, length);
}

/// Lets the kernel drop cached pages that lie wholly in a part; pages that are mapped, or not on
/// the disk yet, stay. A length of 0 reaches to the file's end.
pub(crate) fn drop_cached(file: &File, offset: u64, length: u64) {
    #[cfg(target_os = "linux")]
    advise(file, offset, length, libc::POSIX_FADV_DONTNEED);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, length);
}

#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, length: u64, advice: libc::c_int) {
    // SAFETY: the descriptor is open while `file` is borrowed; no memory is passed.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, length as libc::off_t, advice);
    }
}

/// Lets the kernel read nothing ahead.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn read_nothing_ahead(file: &File) {
    // SAFETY: the descriptor is open while `file` is borrowed; no memory is passed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

/// Whether the file lies on a file system that is itself memory.
pub(crate) fn is_memory(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: all-zero bytes are a valid statfs.
        let mut figures: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open while `file` is borrowed, the struct is ours.
        let done = unsafe { libc::fstatfs(file.as_raw_fd(), &mut figures) };
        done == 0 && matches!(figures.f_type as i64, 0x0102_1994 | 0x8584_58f6)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// Opens a regular file to read: no link is followed, and a pipe does not block.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Opens a regular file to read, through links; a pipe does not block.
pub(crate) fn open_data(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Makes what was renamed or made in a folder outlive a power cut.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Lets the kernel start to write a part to the disk, so that a later sync waits less.
pub(crate) fn start_writing(file: &File, offset: u64, length: u64) {
    #[cfg(target_os = "linux")]
    // SAFETY: the descriptor is open while `file` is borrowed; no memory is passed.
    unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            offset as libc::off64_t,
            length as libc::off64_t,
            libc::SYNC_FILE_RANGE_WRITE,
        );
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, length);
}
