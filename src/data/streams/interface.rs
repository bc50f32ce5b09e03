//! How a reader of records is made and what of its input can be set: the same for all of them.

/// For a reader with `new(inputs)` and a field `course`.
macro_rules! interface {
    ($Reader:ident) => {
        impl $Reader {
            /// Of a file, or of a named pipe, which each epoch opens anew.
            pub fn of_file(path: impl Into<PathBuf>) -> Self {
                Self::of_files([path])
            }

            /// Of several files, in this order, as one stream. They are opened one by one.
            pub fn of_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
                Self::new(Inputs::of_files(paths))
            }

            /// Of a reader, for one epoch. A read that waits cannot be ended: a loader that is dropped
            /// leaves its thread behind until the read comes back.
            pub fn of_reader(read: impl Read + Send + 'static) -> Self {
                Self::new(Inputs::of_reader(read))
            }

            /// Of a pipe, a child's output or another open file, from where it stands, for one epoch.
            /// Dropping the loader ends a read that waits.
            pub fn of_pipe(pipe: impl Into<OwnedFd>) -> Self {
                Self::new(Inputs::of_pipe(pipe))
            }

            /// Of the standard input, as [`of_pipe`](Self::of_pipe). What [`std::io::stdin`] has
            /// buffered is not seen.
            ///
            /// # Errors
            /// [`Error::Io`](crate::Error::Io) where there is none.
            pub fn stdin() -> Result<Self> {
                Ok(Self::new(Inputs::stdin()?))
            }

            /// Of what this opens, anew for each epoch, and for each
            /// [`seek`](crate::data::Loader::seek). As for [`of_reader`](Self::of_reader), a read that
            /// waits cannot be ended.
            pub fn with(open: impl FnMut() -> io::Result<Box<dyn Read + Send>> + Send + 'static) -> Self {
                Self::new(Inputs::with(open))
            }

            /// Reads the files in another order each epoch, made of this seed and the epoch alone.
            pub fn shuffle_files(mut self, seed: u64) -> Self {
                self.course.inputs.shuffle = Some(seed);
                self
            }

            /// Drops a regular file's pages from the page cache each time so many bytes of it were
            /// read. Reading them again is then reading the disk.
            pub fn drop_behind(mut self, bytes: u64) -> Self {
                self.course.inputs.reading.behind = Some(bytes);
                self
            }

            /// The largest window, as a power of two from 10 to 31, that a zstd file may ask for, which
            /// is its decoder's memory; 23, which is 8 MiB, unless set. `zstd --ultra -22` and
            /// `zstd --long` need 27. Another number is [`Error::Config`](crate::Error::Config) when
            /// an epoch begins.
            pub fn zstd_window(mut self, log2: u32) -> Self {
                self.course.inputs.reading.window = log2;
                self
            }
        }

        impl fmt::Debug for $Reader {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($Reader)).field("next", &self.mark()).finish_non_exhaustive()
            }
        }
    };
}

pub(super) use interface;
