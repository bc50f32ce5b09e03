//! What optimizers refuse, and that a refusal has changed nothing.

mod support;

use memfit::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Decay, GroupOptions, Lion,
    LionConfig, Muon, MuonConfig, Optimizer, ParamGroup, Sgd, SgdConfig,
};
use memfit::state::{Named, State, StateVisitor, Value};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{CpuOffload, Error, Update, memory};
use support::{live, serial, set_grad, values};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

type Make = fn(&Tensor) -> Box<dyn Optimizer>;

fn list(w: &Tensor) -> Vec<Tensor> {
    vec![w.shallow_clone()]
}

fn sgd(w: &Tensor, config: SgdConfig) -> Box<dyn Optimizer> {
    Box::new(Sgd::new(&list(w), config.momentum(0.9)).unwrap())
}

fn adamw(w: &Tensor, config: AdamWConfig) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(&list(w), config).unwrap())
}

/// Those of libtorch's kernels and those of our own.
const FUSED: [(&str, Make); 2] =
    [("Sgd", |w| sgd(w, SgdConfig::default())), ("AdamW", |w| adamw(w, AdamWConfig::default()))];
const OWN: [(&str, Make); 7] = [
    ("Sgd, decoupled", |w| sgd(w, SgdConfig::default().decay(Decay::Decoupled))),
    ("AdamW, bf16 moments", |w| adamw(w, AdamWConfig::default().moments(Kind::BFloat16))),
    ("Lion", |w| Box::new(Lion::new(&list(w), LionConfig::default()).unwrap())),
    ("8-bit", |w| Box::new(AdamW8bit::new(&list(w), AdamW8bitConfig::default()).unwrap())),
    ("Adafactor", |w| Box::new(Adafactor::new(&list(w), AdafactorConfig::default()).unwrap())),
    ("Muon", |w| Box::new(Muon::new(&list(w), &list(w)[1..], MuonConfig::default()).unwrap())),
    ("Muon's others", |w| Box::new(Muon::new(&list(w)[1..], &list(w), MuonConfig::default()).unwrap())),
];

fn state_of(optimizer: &mut dyn Optimizer) -> Vec<String> {
    let text = |value: &Value| match value {
        Value::Tensor(tensor) => format!("{:?}", values(&tensor.to_kind(Kind::Float))),
        other => format!("{other:?}"),
    };
    let state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    state.iter().map(|(name, value)| format!("{name} {}", text(value))).collect()
}

/// The error of a step that changed neither weights nor state nor any count.
fn refusal(name: &str, optimizer: &mut dyn Optimizer, w: &Tensor) -> Error {
    optimizer.allocate().unwrap();
    let (before, state) = (w.detach().copy(), state_of(optimizer));
    let error = optimizer.step(&Update::plain()).expect_err(name);
    assert!(w.detach().equal(&before), "{name} moved a weight");
    assert_eq!(state_of(optimizer), state, "{name}");
    error
}

#[test]
fn a_sparse_gradient_is_refused_in_words_and_is_no_step() {
    let _guard = serial();
    for (name, make) in FUSED.into_iter().chain(OWN) {
        let w = Tensor::randn([100, 64], CPU).set_requires_grad(true);
        let rows = Tensor::from_slice(&[3i64, 7]);
        Tensor::embedding(&w, &rows, -1, false, true).sum(Kind::Float).backward();
        assert!(w.grad().is_sparse());
        let error = refusal(name, make(&w).as_mut(), &w);
        assert!(error.to_string().contains("give the embedding dense gradients"), "{name}: {error}");
    }
}

#[test]
fn a_parameter_whose_elements_share_memory_is_refused_by_our_own_kernels() {
    let _guard = serial();
    for (name, make) in OWN.into_iter().filter(|(name, _)| *name != "Muon's others") {
        let w = Tensor::randn([1, 64], CPU).expand([100, 64], false).detach().set_requires_grad(true);
        w.square().sum(Kind::Float).backward();
        let error = refusal(name, make(&w).as_mut(), &w);
        assert!(error.to_string().contains("share memory"), "{name}: {error}");
    }
}

#[test]
fn adafactor_refuses_gradients_that_would_make_a_whole_matrix_nan() {
    let _guard = serial();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
        for shape in [&[6, 4][..], &[33, 20], &[40]] {
            for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 2e19] {
                if kind == Kind::Double && bad == 2e19 {
                    continue;
                }
                let w = Tensor::randn(shape, CPU).to_kind(kind).set_requires_grad(true);
                let mut optimizer = Adafactor::new(&list(&w), AdafactorConfig::default()).unwrap();
                set_grad(&w, &Tensor::randn(shape, CPU).to_kind(kind));
                optimizer.step(&Update::plain()).unwrap();
                let grad = Tensor::randn(shape, CPU).to_kind(kind);
                let _ = grad.view([-1]).get(5).fill_(bad);
                set_grad(&w, &grad);
                let error = refusal("Adafactor", &mut optimizer, &w);
                assert!(matches!(error, Error::NotFinite { .. }), "{kind:?} {shape:?} {bad}: {error}");
                let alone = optimizer.step_parameter(0, 0, &Update::plain());
                assert!(matches!(alone, Err(Error::NotFinite { .. })));
                assert_eq!(optimizer.steps(), 1);
                // Divided as a loss scale is, it is an element like the others.
                if bad == 2e19 {
                    let update = Update { divisor: 2f64.powi(60), ..Update::plain() };
                    optimizer.step(&update).unwrap();
                    assert!(finite(&w));
                }
            }
        }
    }
}

fn finite(w: &Tensor) -> bool {
    w.detach().isfinite().all().int64_value(&[]) == 1
}

#[test]
fn adafactor_moves_by_large_gradients_and_large_weights() {
    let _guard = serial();
    for (kind, slope, value) in
        [(Kind::Float, 1e19, 1.0), (Kind::Float, 1.0, 3e19), (Kind::Double, 1e30, 1e30)]
    {
        for shape in [&[6, 40][..], &[40]] {
            let w = Tensor::ones(shape, CPU).to_kind(kind);
            let _ = w.view([-1]).get(20).fill_(value);
            let w = w.set_requires_grad(true);
            let before = w.detach().copy();
            let mut optimizer = Adafactor::new(&list(&w), AdafactorConfig::default()).unwrap();
            let grad = Tensor::ones(shape, CPU).to_kind(kind);
            let _ = grad.view([-1]).get(20).fill_(slope);
            set_grad(&w, &grad);
            optimizer.step(&Update::plain()).unwrap();
            assert!(finite(&w) && !w.detach().equal(&before), "{kind:?} {slope} {value} {shape:?}");
        }
    }
}

/// As a state from elsewhere may hold it.
#[test]
fn a_second_moment_that_is_no_number_does_not_leave_updates_unclipped() {
    let _guard = serial();
    let w = Tensor::ones([40], CPU).set_requires_grad(true);
    let mut optimizer = Adafactor::new(&list(&w), AdafactorConfig::default()).unwrap();
    optimizer.allocate().unwrap();
    let _ = optimizer.state_of(0, 0)[0].get(3).fill_(f64::NAN);
    set_grad(&w, &Tensor::ones([40], CPU));
    optimizer.step(&Update::plain()).unwrap();
    assert!(w.detach().isnan().all().int64_value(&[]) == 1, "seen at once, everywhere");
}

#[test]
fn settings_that_fp32_cannot_hold_or_the_paper_does_not_have_are_refused() {
    let _guard = serial();
    let w = Tensor::randn([6, 4], CPU).set_requires_grad(true);
    let muon = |epsilon: f64| Muon::new(&list(&w), &list(&w)[1..], MuonConfig::default().epsilon(epsilon));
    assert!(matches!(muon(1e-40), Err(Error::Config { .. })));
    let mut least = muon(f32::MIN_POSITIVE.into()).unwrap();
    set_grad(&w, &w.zeros_like().detach());
    least.step(&Update::plain()).unwrap();
    assert!(finite(&w));
    let adafactor = |decay: f64| Adafactor::new(&list(&w), AdafactorConfig::default().decay(decay));
    assert!(matches!(adafactor(1.5), Err(Error::Config { .. })));
    assert!(adafactor(1.0).is_ok());
}

/// A plain update with elements in two orders takes memory, one of our own takes none.
#[test]
fn a_frozen_half_precision_parameter_does_not_choose_the_kernel_of_the_others() {
    let _guard = serial();
    let adamw = |all: &Vec<Tensor>| -> Box<dyn Optimizer> {
        Box::new(AdamW::new(all, AdamWConfig::default().stochastic_rounding(1)).unwrap())
    };
    let sgd = |all: &Vec<Tensor>| -> Box<dyn Optimizer> {
        Box::new(Sgd::new(all, SgdConfig::default().stochastic_rounding(1)).unwrap())
    };
    for make in [&adamw as &dyn Fn(&Vec<Tensor>) -> Box<dyn Optimizer>, &sgd] {
        let peak = |frozen: bool| {
            let w = Tensor::randn([80, 60], CPU).set_requires_grad(true);
            w.sum(Kind::Float).backward();
            w.grad().set_data(&Tensor::randn([60, 80], CPU).tr());
            let half = Tensor::randn([8], CPU).to_kind(Kind::BFloat16).set_requires_grad(!frozen);
            let mut optimizer = make(&vec![w, half]);
            optimizer.allocate().unwrap();
            let before = live();
            let (stepped, peak) = memory::peak_of(Device::Cpu, || optimizer.step(&Update::plain())).unwrap();
            stepped.unwrap();
            peak - before
        };
        assert_eq!(peak(false), 0);
        assert!(peak(true) > 0);
    }
}

#[test]
fn a_group_of_8_bit_adamw_may_keep_fp32_moments_and_is_adamw() {
    let _guard = serial();
    let leaf = |value: &Tensor| value.copy().set_requires_grad(true);
    let start = Tensor::randn([100, 64], CPU).to_kind(Kind::BFloat16);
    let (hidden, rows, alone) = (leaf(&start), leaf(&start), leaf(&start));
    let build = || {
        let mut eight =
            AdamW8bit::new(&[Named::new("hidden", &hidden)][..], AdamW8bitConfig::default()).unwrap();
        eight.add_fp32(vec![Named::new("rows", &rows)], GroupOptions::default().lr(0.25)).unwrap();
        eight
    };
    let mut eight = build();
    let config = AdamWConfig::default().lr(0.25).moments(Kind::Float);
    let mut plain = AdamW::new(&list(&alone), config).unwrap();
    for _ in 0..3 {
        let grad = Tensor::randn([100, 64], CPU).to_kind(Kind::BFloat16);
        [&hidden, &rows, &alone].into_iter().for_each(|w| set_grad(w, &grad));
        eight.step(&Update::plain()).unwrap();
        plain.step(&Update::plain()).unwrap();
    }
    assert!(rows.detach().equal(&alone.detach()) && !rows.detach().equal(&hidden.detach()));
    assert_eq!(eight.state_bytes(), 2 * (6400 + 4 * 25) + 8 * 6400);

    let state = State::collect(|visitor| eight.visit_state(visitor)).unwrap();
    let mut same = build();
    same.load(&state).unwrap();
    assert_eq!(state_of(&mut same), state_of(&mut eight));
    let both = [Named::new("hidden", &hidden)];
    let mut quantised = AdamW8bit::new(&both[..], AdamW8bitConfig::default()).unwrap();
    quantised.add_group(vec![Named::new("rows", &rows)], GroupOptions::default()).unwrap();
    assert!(matches!(quantised.load(&state), Err(Error::State { .. })));
    // A group that is refused leaves none behind.
    assert!(eight.add_fp32(vec![Named::new("rows", &rows)], GroupOptions::default()).is_err());
    let large = leaf(&start);
    eight.add_group(vec![Named::new("large", &large)], GroupOptions::default()).unwrap();
    assert_eq!(eight.state_bytes(), 4 * (6400 + 4 * 25) + 8 * 6400);
}

/// An optimizer that loads in its own way: from states that call everything `old.…`.
#[derive(Debug)]
struct Renamed(AdamW);

impl Optimizer for Renamed {
    fn name(&self) -> String {
        self.0.name()
    }
    fn groups(&self) -> &[ParamGroup] {
        self.0.groups()
    }
    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.0.groups_mut()
    }
    fn step(&mut self, update: &Update) -> memfit::Result<()> {
        self.0.step(update)
    }
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> memfit::Result<()> {
        self.0.visit_state(visitor)
    }
    fn allocate(&mut self) -> memfit::Result<()> {
        self.0.allocate()
    }
    fn begin(&mut self, update: &Update) -> memfit::Result<()> {
        self.0.begin(update)
    }
    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> memfit::Result<()> {
        self.0.step_parameter(group, index, update)
    }
    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.0.state_of(group, index)
    }
    fn load(&mut self, state: &State) -> memfit::Result<()> {
        state.load(|visitor| visitor.nested("old", |visitor| self.0.visit_state(visitor)))
    }
}

#[test]
fn an_optimizers_own_way_to_load_is_kept_while_its_state_is_on_disk() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    let (w, other) =
        (Tensor::ones([9], CPU).set_requires_grad(true), Tensor::ones([9], CPU).set_requires_grad(true));
    let mut saved = AdamW::new(&list(&w), AdamWConfig::default()).unwrap();
    set_grad(&w, &Tensor::randn([9], CPU));
    saved.step(&Update::plain()).unwrap();
    let state =
        State::collect(|visitor| visitor.nested("old", |visitor| saved.visit_state(visitor))).unwrap();
    let inner = Renamed(AdamW::new(&list(&other), AdamWConfig::default()).unwrap());
    let mut offloaded = CpuOffload::optimizer(inner).disk(folder.path()).unwrap();
    offloaded.load(&state).unwrap();
    assert_eq!(state_of(&mut offloaded), state_of(&mut saved));
    // It is away again, and continues.
    let grad = Tensor::randn([9], CPU);
    memfit::tch::no_grad(|| other.shallow_clone().copy_(&w));
    for (w, optimizer) in [(&w, &mut saved as &mut dyn Optimizer), (&other, &mut offloaded)] {
        set_grad(w, &grad);
        optimizer.step(&Update::plain()).unwrap();
    }
    assert!(w.detach().equal(&other.detach()));
}
