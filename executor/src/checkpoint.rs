//! The checkpoint's files, from which weights are read piece by piece.
//!
//! No file is mapped: of a mapped one the system counts as this process's memory whatever it holds in one piece, up to
//! 2 MiB for a byte that is touched.

mod view;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::mem;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use ir::id::{FileId, Table};
use ir::model::CheckpointFile;
use ir::plan::Weight;
use ir::tensor::DType;
use ir::weight::Source;

use self::view::View;
use crate::memory::Region;

/// Bytes that are read at a time and then converted: they stay in a core's first cache, and copying them takes some ten
/// times as long as a call of the system.
const PIECE_BYTES: usize = 32 << 10;
/// Bytes between the columns of two rows that are read with them, which takes no longer than another call.
const SKIPPED_BYTES: usize = 4 << 10;

/// A matrix or vector as a checkpoint has it.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    /// A view of one or two axes.
    Whole(Source),
    /// A view of each row.
    Rows(Vec<Source>),
}

/// Every file of a checkpoint, open.
pub(crate) struct Checkpoint {
    files: Table<FileId, Opened>,
}

/// A matrix or vector that a checkpoint has, to be read by any threads.
pub(crate) struct Matrix<'a> {
    checkpoint: &'a Checkpoint,
    stored: &'a Stored,
    /// Of one that is stored transposed all columns, one after another.
    columns: Option<Region>,
}

struct Opened {
    file: File,
    bytes: u64,
    path: PathBuf,
}

impl Checkpoint {
    /// Opens the files of a plan that lies in `folder`.
    ///
    /// # Errors
    /// When a file is missing, or is not what it was when the plan was made.
    pub(crate) fn open(files: &Table<FileId, CheckpointFile>, folder: &Path) -> Result<Self> {
        let files = files.rows().iter().map(|file| open(file, folder)).collect::<Result<_>>()?;
        Ok(Self { files })
    }

    /// A matrix of `rows` rows and `columns` columns; a vector is one row. One that is stored transposed is in memory
    /// for as long as the result lives, since each of its rows lies all over it.
    ///
    /// # Errors
    /// When it has another shape, or lies beyond the end of a file.
    pub(crate) fn matrix<'a>(
        &'a self,
        stored: &'a Stored,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<'a>> {
        let shape = stored.shape();
        let is_vector = rows == 1 && shape == [columns as u32];
        ensure!(
            is_vector || shape == [rows as u32, columns as u32],
            "its source has shape {shape:?}"
        );
        for source in stored.sources() {
            let is_inside = source.span().1 <= self.opened(source)?.bytes;
            ensure!(is_inside, "a weight lies beyond the end of its file");
        }
        let columns = match stored {
            Stored::Whole(source) if View::of(source)?.is_transposed() => {
                Some(self.columns(source)?)
            }
            Stored::Whole(_) | Stored::Rows(_) => None,
        };
        Ok(Matrix { checkpoint: self, stored, columns })
    }

    /// All columns of a matrix, one after another.
    fn columns(&self, source: &Source) -> Result<Region> {
        let source = source.clone().transposed();
        let view = View::of(&source)?;
        let elements = view.rows * view.columns;
        let mut region = Region::new(elements * source.dtype.bytes() as usize)?;
        self.copy(&source, &view, 0..view.rows, region.as_mut_slice())?;
        Ok(region)
    }

    /// Writes rows of a view as they are stored, one after another.
    fn copy(
        &self,
        source: &Source,
        view: &View<'_>,
        rows: Range<usize>,
        mut out: &mut [u8],
    ) -> Result<()> {
        let (file, element_bytes) = (self.opened(source)?, source.dtype.bytes() as usize);
        for (stretch, _) in view.stretches(rows, usize::MAX, 0) {
            let bytes = stretch.len() * element_bytes;
            let (now, later) = mem::take(&mut out).split_at_mut(bytes);
            file.read(source, stretch.start, now)?;
            out = later;
        }
        Ok(())
    }

    /// Writes elements of rows of a view, each decoded from `N` bytes, row-major.
    fn decode<const N: usize>(
        &self,
        source: &Source,
        view: &View<'_>,
        rows: Range<usize>,
        mut out: &mut [f32],
        decode: impl Fn([u8; N]) -> f32,
    ) -> Result<()> {
        let file = self.opened(source)?;
        let mut piece = [0; PIECE_BYTES];
        for (stretch, runs) in view.stretches(rows, PIECE_BYTES / N, SKIPPED_BYTES / N) {
            let piece = &mut piece[..stretch.len() * N];
            file.read(source, stretch.start, piece)?;
            let (elements, _) = piece.as_chunks::<N>();
            for run in runs {
                let (now, later) = mem::take(&mut out).split_at_mut(run.len());
                let elements = &elements[run.start - stretch.start..run.end - stretch.start];
                now.iter_mut().zip(elements).for_each(|(out, element)| *out = decode(*element));
                out = later;
            }
        }
        Ok(())
    }

    fn opened(&self, source: &Source) -> Result<&Opened> {
        self.files.get(source.file).context("a weight names a file that is not there")
    }
}

impl Matrix<'_> {
    /// Writes elements of rows `rows`, as f32, row-major.
    ///
    /// # Errors
    /// When there are no such rows, or they cannot be read.
    pub(crate) fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match self.stored {
            Stored::Whole(source) => self.read_view(source, rows, out),
            Stored::Rows(sources) => {
                let sources =
                    sources.get(rows.clone()).with_context(|| format!("rows {rows:?}"))?;
                let columns = out.len() / sources.len().max(1);
                let out = out.chunks_exact_mut(columns.max(1));
                sources.iter().zip(out).try_for_each(|(row, out)| self.read_view(row, 0..1, out))
            }
        }
    }

    /// Writes rows as they are stored, one after another; `false`, and nothing is written, where they are stored as
    /// other numbers, or not as rows.
    ///
    /// # Errors
    /// When there are no such rows, or they cannot be read.
    pub(crate) fn copy(&self, dtype: DType, rows: Range<usize>, out: &mut [u8]) -> Result<bool> {
        let Stored::Whole(source) = self.stored else { return Ok(false) };
        if source.dtype != dtype || self.columns.is_some() {
            return Ok(false);
        }
        let view = View::of(source)?;
        let bytes = rows.len() * view.columns * dtype.bytes() as usize;
        ensure!(rows.end <= view.rows && out.len() == bytes, "rows {rows:?}");
        self.checkpoint.copy(source, &view, rows, out)?;
        Ok(true)
    }

    fn read_view(&self, source: &Source, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match source.dtype {
            DType::F32 => self.read_as(source, rows, out, f32::from_le_bytes),
            DType::F16 => self.read_as(source, rows, out, |x| f16::from_le_bytes(x).to_f32()),
            DType::Bf16 => self.read_as(source, rows, out, |x| bf16::from_le_bytes(x).to_f32()),
            DType::I32 | DType::U8 | DType::I8 => bail!("a weight is stored as integers"),
        }
    }

    fn read_as<const N: usize>(
        &self,
        source: &Source,
        rows: Range<usize>,
        out: &mut [f32],
        decode: impl Fn([u8; N]) -> f32,
    ) -> Result<()> {
        let view = View::of(source)?;
        ensure!(rows.end <= view.rows && out.len() == rows.len() * view.columns, "rows {rows:?}");
        let Some(columns) = &self.columns else {
            return self.checkpoint.decode(source, &view, rows, out, decode);
        };
        // Neighbours in memory are neighbours in a column, so columns go outside.
        let (elements, _) = columns.as_slice::<u8>().as_chunks::<N>();
        for (column, elements) in elements.chunks_exact(view.rows).enumerate() {
            let out = out[column..].iter_mut().step_by(view.columns);
            out.zip(&elements[rows.clone()]).for_each(|(out, element)| *out = decode(*element));
        }
        Ok(())
    }
}

impl Opened {
    /// Fills `out` from element number `first` on, counted from where the view starts.
    fn read(&self, source: &Source, first: usize, out: &mut [u8]) -> Result<()> {
        let at = source.offset + first as u64 * source.dtype.bytes();
        self.file
            .read_exact_at(out, at)
            .with_context(|| format!("reading {} bytes of {}", out.len(), self.path.display()))
    }
}

impl Stored {
    fn sources(&self) -> &[Source] {
        match self {
            Stored::Whole(source) => std::slice::from_ref(source),
            Stored::Rows(sources) => sources,
        }
    }

    fn shape(&self) -> Vec<u32> {
        match self {
            Stored::Whole(source) => source.shape(),
            Stored::Rows(sources) => {
                let row = sources.first().map(Source::shape).unwrap_or_default();
                [&[sources.len() as u32], row.as_slice()].concat()
            }
        }
    }
}

/// The matrices of a weight as a checkpoint has them: one, or one for each expert of a stack.
pub(crate) fn matrices(weight: &Weight) -> Result<Vec<Stored>> {
    let axes = weight.shape.len();
    let source = weight.sources.first().context("it has no source")?;
    if axes < 3 {
        let is_whole = source.axes.len() == axes;
        let rows = || Stored::Rows(weight.sources.clone());
        return Ok(vec![if is_whole { Stored::Whole(source.clone()) } else { rows() }]);
    }
    if source.axes.len() < axes {
        return Ok(weight.sources.iter().cloned().map(Stored::Whole).collect());
    }
    let matrix = |start| Ok(Stored::Whole(source.part(start)?));
    (0..weight.shape[0]).map(matrix).collect()
}

fn open(file: &CheckpointFile, folder: &Path) -> Result<Opened> {
    let path = folder.join(&file.path);
    let name = path.display();
    let opening = || format!("opening checkpoint file {name}");
    let found = fs::metadata(&path).map_err(|error| {
        if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
            anyhow!("the checkpoint's file {name} is gone; --model FOLDER names where it lies now")
        } else {
            anyhow!(error).context(opening())
        }
    })?;
    // To open a pipe would wait for whoever writes to it.
    ensure!(found.is_file(), "{name} is no file");
    let opened = File::open(&path).with_context(opening)?;
    let bytes = opened.metadata().with_context(|| format!("reading the size of {name}"))?.len();
    ensure!(
        bytes == file.bytes,
        "checkpoint changed since it was compiled: {name} has {bytes} bytes, the plan expects {}: \
         compile it again",
        file.bytes
    );
    let fingerprint = ir::fingerprint_of_file(bytes, |at, piece| opened.read_exact_at(piece, at))
        .with_context(|| format!("reading {name}"))?;
    ensure!(
        fingerprint == file.fingerprint,
        "checkpoint changed since it was compiled: {name} has other contents than the plan expects: \
         compile it again"
    );
    Ok(Opened { file: opened, bytes, path })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use ir::id::Id as _;
    use ir::weight::{Slice, Stride};

    use super::*;

    fn checkpoint(contents: &[u8], plan: impl Fn(&mut CheckpointFile)) -> Result<Checkpoint> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(contents)?;
        let mut entry = CheckpointFile {
            path: file.path().to_path_buf(),
            bytes: contents.len() as u64,
            fingerprint: ir::fingerprint(contents),
        };
        plan(&mut entry);
        Checkpoint::open(&[entry].into_iter().collect(), Path::new("."))
    }

    /// The numbers from 0 on, in f32.
    fn counting(count: usize) -> Checkpoint {
        let contents: Vec<u8> = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
        checkpoint(&contents, |_| ()).unwrap()
    }

    /// A matrix of f32 in the only file.
    fn matrix(offset: u64, rows: usize, columns: usize) -> Source {
        let shape = [rows as u32, columns as u32];
        Source::contiguous(FileId::from_index(0), DType::F32, offset, &shape)
    }

    fn read(
        checkpoint: &Checkpoint,
        stored: &Stored,
        (rows, columns): (usize, usize),
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        let mut out = vec![f32::NAN; range.len() * columns];
        checkpoint.matrix(stored, rows, columns)?.read(range, &mut out)?;
        Ok(out)
    }

    #[test]
    fn rows_transposes_and_interleaved_axes_are_read() {
        let checkpoint = counting(24);
        let (matrix, beyond) = (matrix(0, 4, 6), Stored::Whole(matrix(4, 4, 6)));
        let whole = Stored::Whole(matrix.clone());
        let out = read(&checkpoint, &whole, (4, 6), 1..3).unwrap();
        assert_eq!(out, (6..18).map(|i| i as f32).collect::<Vec<_>>());

        let transposed = Stored::Whole(matrix.clone().transposed());
        let out = read(&checkpoint, &transposed, (6, 4), 1..3).unwrap();
        assert_eq!(out, [1.0, 7.0, 13.0, 19.0, 2.0, 8.0, 14.0, 20.0]);

        // Rows 0, 1 of every group of 2 × 3 rows of 2 columns.
        let strides = |outer, inner| {
            vec![Stride { size: 2, stride: outer }, Stride { size: 2, stride: inner }]
        };
        let columns = vec![Stride { size: 2, stride: 1 }];
        let interleaved = Source { axes: vec![strides(12, 2), columns], ..matrix.clone() };
        let numbers = [0.0, 1.0, 2.0, 3.0, 12.0, 13.0, 14.0, 15.0];
        let out = read(&checkpoint, &Stored::Whole(interleaved.clone()), (4, 2), 0..4).unwrap();
        assert_eq!(out, numbers);
        let out = read(&checkpoint, &Stored::Whole(interleaved.transposed()), (2, 4), 0..2);
        assert_eq!(out.unwrap(), [0.0, 2.0, 12.0, 14.0, 1.0, 3.0, 13.0, 15.0]);
        let columns = Source { axes: vec![strides(12, 1)], ..matrix.clone() };
        let out = read(&checkpoint, &Stored::Whole(columns), (1, 4), 0..1).unwrap();
        assert_eq!(out, [0.0, 1.0, 12.0, 13.0]);

        let reordered = Stored::Rows([3, 0, 2].map(|row| matrix.part(row).unwrap()).to_vec());
        let out = read(&checkpoint, &reordered, (3, 6), 1..3).unwrap();
        assert_eq!(out[..6], (0..6).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(out[6..], (12..18).map(|i| i as f32).collect::<Vec<_>>());
        assert!(read(&checkpoint, &reordered, (3, 6), 2..4).is_err());
        assert!(read(&checkpoint, &whole, (6, 4), 0..1).is_err());
        assert!(read(&checkpoint, &beyond, (4, 6), 0..1).is_err());
    }

    #[test]
    fn parts_of_rows_are_read_however_far_they_lie_apart() {
        // Rows of more than a piece, some in a piece with little between them, and some with much.
        for row in [PIECE_BYTES / 4 * 2 + 5, 700, 2500] {
            let rows = 7;
            let checkpoint = counting(rows * row);
            let matrix = matrix(0, rows, row);
            for (start, size) in [(0, row), (0, row / 2), (row / 3, row - row / 3), (5, 3)] {
                let slice = Slice { axis: 1, start: start as u32, size: size as u32 };
                let part = Stored::Whole(matrix.sliced(slice).unwrap());
                let out = read(&checkpoint, &part, (rows, size), 1..6).unwrap();
                let numbers = (1..6).flat_map(|at| (at * row + start..).take(size));
                assert!(out.iter().copied().eq(numbers.map(|i| i as f32)), "{row} {start} {size}");

                let mut bytes = vec![0; 5 * size * 4];
                let found = checkpoint.matrix(&part, rows, size).unwrap();
                assert!(found.copy(DType::F32, 1..6, &mut bytes).unwrap());
                assert_eq!(bytemuck::cast_slice::<f32, u8>(&out), bytes);
                assert!(!found.copy(DType::F16, 1..6, &mut bytes).unwrap());
            }
        }
    }

    #[test]
    fn a_changed_file_is_refused() {
        let message = |result: Result<Checkpoint>| format!("{:#}", result.err().unwrap());
        let size = message(checkpoint(&[1; 16], |file| file.bytes = 17));
        assert!(size.contains("has 16 bytes, the plan expects 17"), "{size}");
        let contents = message(checkpoint(&[1; 16], |file| file.fingerprint ^= 1));
        assert!(contents.contains("changed since it was compiled"), "{contents}");
        let missing = message(checkpoint(&[1; 16], |file| file.path = "no/such/file".into()));
        assert!(missing.contains("no/such/file"), "{missing}");
    }

    #[test]
    fn a_file_that_is_cut_short_meanwhile_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&[0; 64], 0).unwrap();
        let (path, fingerprint) = (file.path().to_owned(), ir::fingerprint(&[0; 64]));
        let files = [CheckpointFile { path, bytes: 64, fingerprint }];
        let checkpoint = Checkpoint::open(&files.into_iter().collect(), Path::new(".")).unwrap();
        let matrix = Stored::Whole(matrix(0, 4, 4));
        read(&checkpoint, &matrix, (4, 4), 0..4).unwrap();
        file.as_file().set_len(32).unwrap();
        read(&checkpoint, &matrix, (4, 4), 0..2).unwrap();
        let error = format!("{:#}", read(&checkpoint, &matrix, (4, 4), 0..4).unwrap_err());
        assert!(error.contains(&file.path().display().to_string()), "{error}");
    }
}
