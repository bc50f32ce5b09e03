use std::path::PathBuf;
// Replaced by the version on the xtask branch.
fn main() {
    let lib = PathBuf::from(std::env::var("DEP_TCH_LIBTORCH_LIB").expect("libtorch"));
    let inc = lib.join("../include");
    let mut b = cc::Build::new();
    for f in std::fs::read_dir("src/ffi/shim").unwrap() {
        let p = f.unwrap().path();
        println!("cargo:rerun-if-changed={}", p.display());
        if p.extension().is_some_and(|e| e == "cpp") {
            b.file(p);
        }
    }
    b.cpp(true)
        .std("c++17")
        .opt_level(2)
        .define("NDEBUG", None)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .flag("-isystem")
        .flag(inc.to_str().unwrap())
        .flag("-isystem")
        .flag(inc.join("torch/csrc/api/include").to_str().unwrap())
        .include("src/ffi/shim")
        .link_lib_modifier("+whole-archive")
        .compile("memfit_shim");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rustc-link-search=native={}", lib.display());
    for l in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib={l}");
    }
}
