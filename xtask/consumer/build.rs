fn main() {
    // Your binary finds libtorch at run time without LD_LIBRARY_PATH.
    if let Ok(lib) = std::env::var("DEP_MEMFIT_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
