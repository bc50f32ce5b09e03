use super::*;
use crate::scratch::Scratch;
use std::fs;

fn sentence(result: Result<()>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    text
}

/// A user who has set no variable.
fn unset(_: &str) -> Option<OsString> {
    None
}

/// A folder with nothing of libtorch but its version header.
fn headers(version: [u32; 3]) -> Scratch {
    let scratch = Scratch::new("headers");
    let folder = scratch.path().join("include/torch/headeronly");
    fs::create_dir_all(&folder).unwrap();
    let [major, minor, patch] = version;
    let text = format!(
        "#pragma once\n#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n\
         #define TORCH_VERSION_PATCH {patch}\n#define TORCH_VERSION \\\n  \"x\"\n"
    );
    fs::write(folder.join("version.h"), text).unwrap();
    scratch
}

#[test]
fn the_wanted_libtorch_passes() {
    assert_eq!(named_libtorch(headers([2, 13, 0]).path(), unset), Ok(()));
}

#[test]
fn another_version_names_both_and_the_way_out() {
    let text = sentence(named_libtorch(headers([2, 12, 1]).path(), unset));
    assert!(text.contains("2.12.1") && text.contains("2.13.0") && text.contains("unset"), "{text}");
}

#[test]
fn tch_s_own_way_round_the_check_holds_here() {
    let headers = headers([2, 12, 1]);
    let bypass = |name: &str| (name == "LIBTORCH_BYPASS_VERSION_CHECK").then(|| "1".into());
    assert_eq!(named_libtorch(headers.path(), bypass), Ok(()));
    // The headers may be elsewhere than the libraries.
    let elsewhere = |name: &str| (name == "LIBTORCH_INCLUDE").then(|| headers.path().into());
    let text = sentence(named_libtorch(Path::new("/nowhere"), elsewhere));
    assert!(text.contains("2.12.1"), "{text}");
}

#[test]
fn a_folder_that_is_no_libtorch_is_named() {
    let scratch = Scratch::new("empty");
    let text = sentence(named_libtorch(scratch.path(), unset));
    assert!(text.contains(&scratch.path().display().to_string()), "{text}");
}

#[test]
fn a_relative_or_empty_libtorch_is_refused() {
    for path in ["", "libtorch"] {
        let text = sentence(named_libtorch(Path::new(path), unset));
        assert!(text.contains("absolute"), "{text}");
    }
}

#[test]
fn only_x86_64_linux_with_glibc_is_provisioned() {
    assert_eq!(platform_is("linux", "x86_64", true), Ok(()));
    for (os, arch, gnu) in
        [("macos", "aarch64", false), ("linux", "aarch64", true), ("linux", "x86_64", false)]
    {
        let text = sentence(platform_is(os, arch, gnu));
        assert!(text.contains(&format!("{arch} {os}")) && text.contains("LIBTORCH"), "{text}");
    }
}

#[test]
fn a_missing_compiler_says_how_to_get_one() {
    let text = sentence(compiler_named("no-such-compiler"));
    assert!(text.contains("no-such-compiler") && text.contains("apt install g++"), "{text}");
}

#[test]
fn the_compiler_is_found_as_cc_finds_it() {
    assert_eq!(named_compiler(|_| None), "c++");
    assert_eq!(named_compiler(|name| (name == "CXX").then(|| "clang++".into())), "clang++");
    assert_eq!(named_compiler(|name| (name == "CXX").then(String::new)), "c++");
    let specific = |name: &str| match name {
        "CXX_x86_64_unknown_linux_gnu" => Some("specific".to_owned()),
        "CXX" => Some("general".to_owned()),
        _ => None,
    };
    assert_eq!(named_compiler(specific), "specific");
}

#[test]
fn a_missing_python_and_a_missing_pip_differ() {
    let text = sentence(pip(Path::new("no-such-python"), "libtorch", "wait"));
    assert!(text.starts_with("no `no-such-python`"), "{text}");
    let text = sentence(pip(Path::new("false"), "libtorch", "wait"));
    assert!(text.contains("-m pip` does not run"), "{text}");
}

#[test]
fn version_headers_of_every_layout_are_read() {
    let macros = "#  define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR\t11\r\n \
                  #define TORCH_VERSION_PATCH 3\n";
    let found = Version::parse_header(macros).unwrap();
    assert_eq!((found.major, found.minor, found.patch), (2, 11, 3));
    for broken in ["", "#define TORCH_VERSION_MAJOR 2\n", "TORCH_VERSION_MAJOR 2"] {
        assert_eq!(Version::parse_header(broken), None);
    }
    let wrapped = "#include <torch/headeronly/version.h>\n";
    assert_eq!(Version::parse_header(wrapped), None);
}
