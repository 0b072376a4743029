//! Just enough of the FlatBuffers format to read a TFLite model. Every read is checked: a cut file gives `None`, never a panic.

/// A table: a position in the file whose fields are found through its virtual table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table<'a> {
    file: &'a [u8],
    at: usize,
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..at.checked_add(N)?)?.first_chunk().copied()
}

fn u32_at(file: &[u8], at: usize) -> Option<usize> {
    bytes(file, at).map(|b| u32::from_le_bytes(b) as usize)
}

fn u16_at(file: &[u8], at: usize) -> Option<usize> {
    bytes(file, at).map(|b| usize::from(u16::from_le_bytes(b)))
}

impl<'a> Table<'a> {
    /// The file's root.
    pub(super) fn root(file: &'a [u8]) -> Option<Self> {
        let at = u32_at(file, 0)?;
        Some(Self { file, at })
    }

    /// Where a field lies; `None` when it is absent.
    fn field(&self, index: usize) -> Option<usize> {
        let back = i32::from_le_bytes(bytes(self.file, self.at)?);
        let table = self.at.checked_add_signed(-(back as isize))?;
        let place = 4 + 2 * index;
        if place + 2 > u16_at(self.file, table)? {
            return None;
        }
        match u16_at(self.file, table + place)? {
            0 => None,
            offset => self.at.checked_add(offset),
        }
    }

    /// A field that refers to something elsewhere.
    fn reference(&self, index: usize) -> Option<usize> {
        let at = self.field(index)?;
        at.checked_add(u32_at(self.file, at)?)
    }

    /// A byte; 0 when absent.
    pub(super) fn byte(&self, index: usize) -> u8 {
        let field = self.field(index);
        field.and_then(|at| self.file.get(at).copied()).unwrap_or(0)
    }

    /// A 32-bit number; `absent` when absent.
    pub(super) fn number(&self, index: usize, absent: i32) -> i32 {
        let field = self.field(index);
        field
            .and_then(|at| bytes(self.file, at))
            .map_or(absent, i32::from_le_bytes)
    }

    pub(super) fn table(&self, index: usize) -> Option<Self> {
        let at = self.reference(index)?;
        Some(Self {
            file: self.file,
            at,
        })
    }

    /// Length and start of a vector.
    fn vector(&self, index: usize) -> Option<(usize, usize)> {
        let at = self.reference(index)?;
        Some((u32_at(self.file, at)?, at.checked_add(4)?))
    }

    pub(super) fn tables(&self, index: usize) -> Option<Vec<Self>> {
        let (length, start) = self.vector(index)?;
        // A length beyond the file fails at the first entry outside of it.
        let mut tables = Vec::new();
        for entry in 0..length {
            let at = start.checked_add(entry.checked_mul(4)?)?;
            tables.push(Self {
                file: self.file,
                at: at.checked_add(u32_at(self.file, at)?)?,
            });
        }
        Some(tables)
    }

    /// A vector of 32-bit numbers; empty when absent.
    pub(super) fn numbers(&self, index: usize) -> Option<Vec<i32>> {
        let Some((length, start)) = self.vector(index) else {
            return Some(Vec::new());
        };
        let raw = self
            .file
            .get(start..start.checked_add(length.checked_mul(4)?)?)?;
        let chunks = raw.chunks_exact(4);
        Some(
            chunks
                .filter_map(|chunk| chunk.first_chunk().copied())
                .map(i32::from_le_bytes)
                .collect(),
        )
    }

    /// A vector of bytes; empty when absent.
    pub(super) fn data(&self, index: usize) -> Option<&'a [u8]> {
        let Some((length, start)) = self.vector(index) else {
            return Some(&[]);
        };
        self.file.get(start..start.checked_add(length)?)
    }
}
