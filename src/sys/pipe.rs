//! Reads that wait for another process, and can be woken.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Ends reads, from another thread and for good.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    woken: AtomicBool,
    /// Becomes readable, and stays so, when it is woken. Made for the first read that may wait.
    bell: Mutex<Option<(PipeReader, PipeWriter)>>,
}

impl Wake {
    /// Makes the read that waits, and later ones, fail.
    pub(crate) fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        let bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, writer)) = &*bell {
            let _ = (&mut &*writer).write_all(&[0]);
        }
    }

    /// Fails once it was woken.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.woken.load(Ordering::Acquire) {
            true => Err(io::Error::other("the read was ended from outside")),
            false => Ok(()),
        }
    }

    fn bell(&self) -> io::Result<PipeReader> {
        let mut bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = match bell.take() {
            Some(pair) => pair,
            None => io::pipe()?,
        };
        let (reader, _) = bell.insert(pair);
        let reader = reader.try_clone()?;
        // Whoever wakes sets the flag before it looks for the bell, so one of both is seen.
        self.check()?;
        Ok(reader)
    }
}

/// A pipe, terminal or the like, whose reads end when they are woken.
#[derive(Debug)]
pub(crate) struct WakingRead {
    file: File,
    bell: PipeReader,
}

impl WakingRead {
    pub(crate) fn new(file: File, wake: &Arc<Wake>) -> io::Result<Self> {
        Ok(Self { file, bell: wake.bell()? })
    }
}

impl Read for WakingRead {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        use std::os::fd::AsFd;
        loop {
            if wait(self.file.as_fd(), self.bell.as_fd())? {
                return Err(io::Error::other("the read was ended from outside"));
            }
            match self.file.read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

/// Opens a file to read. A named pipe that nobody writes to yet does not keep the call.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Waits until there is something to read, an end or an error; true where the bell rang.
fn wait(file: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> io::Result<bool> {
    let watch = |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut watched = [watch(file), watch(bell)];
    loop {
        // SAFETY: the array is ours and of the length that is passed; both descriptors are open
        // while they are borrowed.
        let ready = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
        if ready >= 0 {
            return Ok(watched[1].revents != 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_pipe_is_left_when_it_is_woken_before_or_during_the_read() {
        let wake = Arc::new(Wake::default());
        let (reader, _writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(reader));
        let mut waiting = WakingRead::new(file, &wake).unwrap();
        let waker = wake.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            waker.wake();
        });
        assert!(waiting.read(&mut [0; 8]).is_err());
        thread.join().unwrap();
        assert!(waiting.read(&mut [0; 8]).is_err());
        let (reader, _writer) = io::pipe().unwrap();
        assert!(WakingRead::new(File::from(std::os::fd::OwnedFd::from(reader)), &wake).is_err());
    }
}
