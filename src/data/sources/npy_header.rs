//! The header of a `.npy` file: a Python dictionary of three entries.

use tch::Kind;

use crate::data::dtype;

/// What a header says of its array.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) shape: Vec<i64>,
}

/// Reads a header; the error says what is wrong with the file.
pub(super) fn parse(header: &[u8]) -> Result<Header, String> {
    // Only names of fields are ever beyond ASCII, and an array with fields is refused.
    let text: String = header.iter().map(|byte| char::from(*byte)).collect();
    let mut text = Text(&text);
    let (mut kind, mut fortran, mut shape) = (None, None, None);
    text.expect('{')?;
    while !text.eat('}') {
        let key = text.quoted()?;
        text.expect(':')?;
        let twice = match key {
            "descr" => kind.replace(text.kind()?).is_some(),
            "fortran_order" => fortran.replace(text.truth()?).is_some(),
            "shape" => shape.replace(text.shape()?).is_some(),
            other => return Err(format!("its header has an entry `{}`", printable(other))),
        };
        if twice {
            return Err(format!("its header has `{key}` twice"));
        }
        if !text.eat(',') {
            text.expect('}')?;
            break;
        }
    }
    if !text.0.trim().is_empty() {
        return Err("its header goes on after its end".to_owned());
    }
    let missing = |name| move || format!("its header has no `{name}`");
    let (kind, fortran) = (kind.ok_or_else(missing("descr"))?, fortran.ok_or_else(missing("fortran_order"))?);
    let shape = shape.ok_or_else(missing("shape"))?;
    if fortran {
        return Err("it is in Fortran order, where a row lies in many places; np.save \
                    np.ascontiguousarray(array)"
            .to_owned());
    }
    Ok(Header { kind, shape })
}

/// What is left of a header.
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    fn eat(&mut self, letter: char) -> bool {
        let text = self.0.trim_start();
        match text.strip_prefix(letter) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, letter: char) -> Result<(), String> {
        if self.eat(letter) { Ok(()) } else { Err(self.unreadable()) }
    }

    fn unreadable(&self) -> String {
        format!("its header cannot be read at `{}`", printable(self.0))
    }

    fn quoted(&mut self) -> Result<&'a str, String> {
        let quote = if self.eat('\'') { '\'' } else { '"' };
        if quote == '"' {
            self.expect('"')?;
        }
        let (inside, rest) = self.0.split_once(quote).ok_or_else(|| self.unreadable())?;
        self.0 = rest;
        Ok(inside)
    }

    fn truth(&mut self) -> Result<bool, String> {
        let text = self.0.trim_start();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = text.strip_prefix(word) {
                self.0 = rest;
                return Ok(value);
            }
        }
        Err(self.unreadable())
    }

    fn shape(&mut self) -> Result<Vec<i64>, String> {
        let mut sizes = Vec::new();
        self.expect('(')?;
        while !self.eat(')') {
            sizes.push(self.number()?);
            if !self.eat(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(sizes)
    }

    fn number(&mut self) -> Result<i64, String> {
        let text = self.0.trim_start();
        let (digits, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let number = digits.parse().map_err(|_| self.unreadable())?;
        self.0 = rest;
        Ok(number)
    }

    fn kind(&mut self) -> Result<Kind, String> {
        if self.0.trim_start().starts_with(['[', '(']) {
            return Err("its array has fields; np.save each field, array['name']".to_owned());
        }
        let descr = self.quoted()?;
        dtype::numpy(descr).ok_or_else(|| refusal(descr))
    }
}

/// The beginning of a text that may be anything.
fn printable(text: &str) -> String {
    text.trim().chars().filter(|letter| !letter.is_control()).take(20).collect()
}

/// Why a dtype of numpy's is none here, and what to write instead.
fn refusal(descr: &str) -> String {
    let convert = |to: &str| format!("libtorch has no dtype '{descr}'; np.save array.astype(np.{to})");
    match descr {
        "<u2" => convert("int32"),
        "<u4" | "<u8" => convert("int64"),
        "<f16" => convert("float64"),
        "<c8" => "its numbers are complex; np.save array.view(np.float32)".to_owned(),
        "<c16" => "its numbers are complex; np.save array.view(np.float64)".to_owned(),
        "|O" => "it has pickled Python objects, which are never run; np.save an array of numbers".to_owned(),
        _ if descr.starts_with('>') => {
            let descr = printable(descr);
            format!("'{descr}' is big-endian; np.save array.astype(array.dtype.newbyteorder('<'))")
        }
        _ => format!("dtype '{}' is no number; np.save an array of numbers", printable(descr)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }          \n";

    fn problem(header: &str) -> String {
        parse(header.as_bytes()).unwrap_err()
    }

    #[test]
    fn headers_are_read_whatever_their_spaces_quotes_and_order() {
        for header in [GOOD, "{\"shape\":(3,2),\"fortran_order\":False,\"descr\":\"<f4\"}"] {
            assert_eq!(parse(header.as_bytes()), Ok(Header { kind: Kind::Float, shape: vec![3, 2] }));
        }
        let shape = |text: &str| parse(GOOD.replace("(3, 2)", text).as_bytes()).map(|header| header.shape);
        assert_eq!(shape("(7,)"), Ok(vec![7]));
        assert_eq!(shape("()"), Ok(vec![]));
    }

    #[test]
    fn headers_that_are_none_are_refused_one_by_one() {
        for (from, to, says) in [
            ("(3, 2)", "(-3, 2)", "cannot be read at `-3, 2)"),
            ("(3, 2)", "(3.0, 2)", "cannot be read at `.0, 2)"),
            ("(3, 2)", "(99999999999999999999, 2)", "cannot be read at `9999"),
            ("(3, 2)", "(3, 2", "cannot be read at `}"),
            ("(3, 2)", "[3, 2]", "cannot be read at `[3, 2]"),
            ("(3, 2)", "(,)", "cannot be read at `,)"),
            ("'<f4'", "'<f4", "dtype '<f4,' is no number"),
            ("'<f4'", "<f4", "cannot be read at `<f4"),
            ("'<f4'", "[('x', '<f4')]", "has fields"),
            ("False", "True", "Fortran order"),
            ("False", "0", "cannot be read at `0"),
            ("'shape'", "'size'", "entry `size`"),
            ("'shape'", "'descr'", "has fields"),
            ("False", "\u{7}", "cannot be read at `,"),
            ("'shape': (3, 2),", "", "no `shape`"),
            ("'descr': '<f4',", "", "no `descr`"),
            ("'fortran_order': False,", "", "no `fortran_order`"),
            ("'fortran_order': False,", "'descr': '<f4',", "`descr` twice"),
            ("}", "", "cannot be read at ``"),
            ("}", "} {", "goes on after its end"),
            ("{", "", "cannot be read at `'descr'"),
        ] {
            let text = problem(&GOOD.replacen(from, to, 1));
            assert!(text.contains(says), "{from} as {to}: {text}");
        }
        assert!(problem("").contains("cannot be read"));
        assert!(problem("{}").contains("no `descr`"));
    }

    #[test]
    fn dtypes_that_libtorch_lacks_name_one_that_it_has() {
        for (descr, says) in [
            ("<u2", "astype(np.int32)"),
            ("<u4", "astype(np.int64)"),
            ("<u8", "astype(np.int64)"),
            ("<f16", "astype(np.float64)"),
            ("<c8", "view(np.float32)"),
            ("<c16", "view(np.float64)"),
            ("|O", "never run"),
            (">f4", "newbyteorder('<')"),
            ("<U7", "is no number"),
            ("<M8[ns]", "is no number"),
        ] {
            assert!(problem(&GOOD.replace("<f4", descr)).contains(says), "{descr}");
        }
    }
}
