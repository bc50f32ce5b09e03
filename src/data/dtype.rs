//! What formats of files call the dtypes that tch has.

use safetensors::Dtype;
use tch::Kind;

use crate::error::{Error, Result};

/// Each dtype that a tensor of tch's can have, with its name in a `.safetensors` file.
const PAIRS: &[(Kind, Dtype, &str)] = &[
    (Kind::Bool, Dtype::BOOL, "BOOL"),
    (Kind::Uint8, Dtype::U8, "U8"),
    (Kind::Int8, Dtype::I8, "I8"),
    (Kind::Int16, Dtype::I16, "I16"),
    (Kind::Int, Dtype::I32, "I32"),
    (Kind::Int64, Dtype::I64, "I64"),
    (Kind::Half, Dtype::F16, "F16"),
    (Kind::BFloat16, Dtype::BF16, "BF16"),
    (Kind::Float, Dtype::F32, "F32"),
    (Kind::Double, Dtype::F64, "F64"),
    (Kind::ComplexFloat, Dtype::C64, "C64"),
    (Kind::Float8e5m2, Dtype::F8_E5M2, "F8_E5M2"),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3, "F8_E4M3"),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ, "F8_E5M2FNUZ"),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ, "F8_E4M3FNUZ"),
];

/// The file's name of a dtype.
pub(crate) fn name_of(kind: Kind, tensor: &str) -> Result<&'static str> {
    let found = PAIRS.iter().find(|(known, ..)| *known == kind);
    found.map(|(.., name)| *name).ok_or_else(|| Error::Unsupported {
        what: format!("writing `{tensor}`, which is {kind:?},"),
        place: "in the safetensors format".to_owned(),
        remedy: "convert it to a dtype that the format has".to_owned(),
    })
}

/// The dtype of a file's name.
pub(crate) fn named(name: &str) -> Option<Kind> {
    PAIRS.iter().find(|(.., known)| *known == name).map(|(kind, ..)| *kind)
}

/// The dtype of a file's, as its parser gives it.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    PAIRS.iter().find(|(_, known, _)| *known == dtype).map(|(kind, ..)| *kind)
}

/// What numpy calls those dtypes of its own that tch has too, in the byte order that is read.
const NUMPY: &[(&str, Kind)] = &[
    ("|b1", Kind::Bool),
    ("|u1", Kind::Uint8),
    ("|i1", Kind::Int8),
    ("<i2", Kind::Int16),
    ("<i4", Kind::Int),
    ("<i8", Kind::Int64),
    ("<f2", Kind::Half),
    ("<f4", Kind::Float),
    ("<f8", Kind::Double),
];

/// The dtype of a `descr` of numpy's.
pub(crate) fn numpy(descr: &str) -> Option<Kind> {
    NUMPY.iter().find(|(known, _)| *known == descr).map(|(_, kind)| *kind)
}
